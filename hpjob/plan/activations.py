"""Bytes that autograd keeps of a layer, and how many microbatches of it are held at once."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

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
        # Half of a microbatch more than 1f1b, where the way back up could not wait.
        return min(m, p + 0.5)
    return min(m * v, 2 * (p - pp_rank - 1) + (v - 1) * p + 1) / v


class Peak(NamedTuple):
    """Bytes beside the layers at the peak of a rank's activations; no recomputation changes them."""

    in_flight: float
    """Microbatches that are held."""
    stage_inputs: float
    """Of every microbatch, beside its layers."""
    layer_input: float
    """All that a layer keeps that is repeated."""
    passing: float
    """While one layer runs backwards."""
    embedded: float
    logits: float

    def with_layers(
        self, chunks: tuple[tuple[int, int], ...], kept: tuple[float, float], every_kth: int
    ) -> tuple[float, float]:
        """Return the bytes of activations at the peak, and of logits.

        The logits are gone when the first layer runs backwards, so the larger of both comes on top of what is kept.

        Args:
            chunks: Layers with a dense MLP and with experts of every model chunk of the rank.
            kept: What a layer with a dense MLP and one with experts keep of a microbatch.
            every_kth: Every how many layers one is repeated; 0 = none is.
        """
        stored, working = self.stage_inputs, 0.0
        for kind in (0, 1):
            count, repeated, at_the_end = _repeated(chunks, kind, every_kth)
            if not count:
                continue
            stored += (count - repeated) * kept[kind] + repeated * self.layer_input
            # A layer that is repeated while all others are held.
            working = max(working, kept[kind] if at_the_end else 0.0)
        held = stored * self.in_flight + self.embedded
        return held + max(0.0, working + self.passing - self.logits), self.logits


@lru_cache(maxsize=4096)
def _repeated(chunks: tuple[tuple[int, int], ...], kind: int, every_kth: int) -> tuple[int, int, bool]:
    """Return how many layers of a kind there are, how many are repeated, and whether the last one of a chunk is."""
    count = sum(chunk[kind] for chunk in chunks)
    if not every_kth:
        return count, 0, False
    repeated = sum(-(-chunk[kind] // every_kth) for chunk in chunks)
    return count, repeated, any(chunk[kind] and (chunk[kind] - 1) % every_kth == 0 for chunk in chunks)
