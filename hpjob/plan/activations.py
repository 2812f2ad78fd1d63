"""Bytes that autograd keeps of a layer, and how many microbatches of it are held at once."""

from __future__ import annotations

from hpjob.plan.constants import Framework
from hpjob.plan.layout import Layout
from hpjob.plan.shape import Shape


def layer_activation_bytes(
    shape: Shape, layout: Layout, habits: Framework, *, experts: bool = False, scores: bool | None = None
) -> float:
    """Bytes that autograd keeps of one layer for one microbatch without full recomputation.

    Around attention and MLP: the inputs of norms and of the products that follow them. Attention keeps q,
    k, v, its output and one statistic a row, or the score matrix where it is not fused. A gated MLP keeps
    gate, up and their product, and the activated gate where kernels are not fused.
    """
    e, tp = layout.element_bytes, layout.tp
    norm_tp = tp if layout.sharded_norms else 1
    around = 4.0 * e * shape.hidden
    if habits.dropout:
        around += 2.0 * shape.hidden
    if shape.rms_norm and habits.fused == "eager":
        # Norms written out in fp32 keep their input in fp32 and the normalised value.
        around += 2.0 * (4 + e) * shape.hidden
    attention = (e * (shape.q_width + shape.value_width) + 4.0 * shape.heads) / tp
    attention += e * 2.0 * shape.kv_width / shape.kv_shards(tp)
    if shape.latent is not None:
        latent = shape.latent
        attention = (e * (2.0 * shape.q_width + 2.0 * shape.value_width) + 4.0 * shape.heads) / tp
        around += 2.0 * e * (latent.q_rank + latent.kv_rank)
    materialised = not layout.flash and layout.recompute != "selective" if scores is None else scores
    if materialised:
        attention += shape.heads * layout.seq * (2.0 * e + 1.0 if habits.dropout else 1.5 * e) / tp
    per_width = (4.0 if habits.fused == "eager" else 3.0) if shape.gated else 2.0
    width = float(shape.ffn if not shape.num_experts else shape.dense_ffn or shape.ffn)
    if experts:
        # Routed tokens are copied to their experts; inputs and outputs of the experts are kept.
        width = shape.ffn * (shape.experts_per_token + shape.shared_experts)
        around += 2.0 * e * shape.hidden * shape.experts_per_token / tp * norm_tp + 4.0 * shape.num_experts
    gathered = e * shape.hidden * habits.gathered_inputs * (1.0 - 1.0 / norm_tp)
    return layout.tokens * (around / norm_tp + gathered + attention + e * per_width * width / tp)


def in_flight(layout: Layout, pp_rank: int) -> float:
    """Microbatches whose activations a pipeline rank holds at its peak, in units of all its layers."""
    p, m, v = layout.pp, layout.num_microbatches, layout.chunks
    if p == 1:
        return 1.0
    if layout.style == "1f1b":
        return float(min(m, p - pp_rank))
    if layout.style == "zbv":
        return float(min(m, p))
    return min(m * v, 2 * (p - pp_rank - 1) + (v - 1) * p + 1) / v
