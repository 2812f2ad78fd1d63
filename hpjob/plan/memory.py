"""Memory of one rank by kind, for the habits of a framework.

Model states are 16-bit compute weights, a gradient buffer, and master weights with two moments, sharded
over dp x sp by ZeRO. Activations are what autograd keeps of a pre-norm layer, times the microbatches that
the schedule holds in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpjob.plan.constants import Framework, framework
from hpjob.plan.hardware import Hardware
from hpjob.plan.layout import Layout, split_layers, stages_of_rank
from hpjob.plan.model import MemoryEstimate
from hpjob.plan.shape import Shape

GIB = 2**30
_CONTEXT_GIB = 1.4
"""CUDA context, cuBLAS workspace and the buffers of the first communicators."""
_CPU_PROCESS_GIB = 0.6
"""Interpreter and libraries of a rank on CPU cores."""
_COMMUNICATOR_GIB = 0.1
USABLE_FRACTION = 0.94
"""What a plan may fill: the rest absorbs the estimate's error."""


def memory_limit_gib(hardware: Hardware) -> float:
    """Return what a plan may fill of one GPU."""
    return round(hardware.memory_gib * USABLE_FRACTION, 2)


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes of one rank by kind, before rounding."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    reserve: float
    """Fragmentation, context, buckets and communicators: what is no tensor of the model."""

    @property
    def tensors(self) -> float:
        """What a framework reports as allocated."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits

    @property
    def total(self) -> float:
        return self.tensors + self.reserve


def rank_memory(
    shape: Shape, layout: Layout, pp_rank: int, *, is_cpu: bool = False, habits: Framework | None = None
) -> MemoryEstimate:
    """Return the peak memory of the ranks of one pipeline stage."""
    b = rank_bytes(shape, layout, pp_rank, habits or framework("hpjob"), is_cpu=is_cpu)
    return MemoryEstimate(
        pp_rank=pp_rank,
        weights_gib=round(b.weights / GIB, 3),
        gradients_gib=round(b.gradients / GIB, 3),
        optimizer_gib=round(b.optimizer / GIB, 3),
        activations_gib=round(b.activations / GIB, 3),
        logits_gib=round(b.logits / GIB, 3),
        workspace_gib=round(b.reserve / GIB, 3),
    )


def worst_bytes(
    shape: Shape, layout: Layout, habits: Framework, *, is_cpu: bool = False, enough: float = float("inf")
) -> RankBytes:
    """Return the bytes of the fullest rank.

    That is the first (embedding, most microbatches in flight), the last (logits), or the second where the
    first has fewer layers.

    Args:
        shape: Sizes of the model.
        layout: Where it goes.
        habits: Those of the framework.
        is_cpu: Ranks run on CPU cores.
        enough: Bytes above which the first rank is answer enough.
    """
    worst = rank_bytes(shape, layout, 0, habits, is_cpu=is_cpu)
    if layout.pp == 1 or worst.total > enough:
        return worst
    stages = split_layers(shape.num_layers, layout.pp * layout.chunks)
    others = {layout.pp - 1} | ({1} if min(stages) < max(stages) else set())
    for rank in sorted(others):
        found = rank_bytes(shape, layout, rank, habits, is_cpu=is_cpu)
        worst = found if found.total > worst.total else worst
    return worst


def worst_total_gib(shape: Shape, layout: Layout, *, is_cpu: bool = False, enough_gib: float = float("inf")) -> float:
    """Return the total of the fullest rank under the habits of our runtime."""
    return worst_bytes(shape, layout, framework("hpjob"), is_cpu=is_cpu, enough=enough_gib * GIB).total / GIB


def rank_bytes(shape: Shape, layout: Layout, pp_rank: int, habits: Framework, *, is_cpu: bool = False) -> RankBytes:
    """Return the bytes of the ranks of one pipeline stage by kind."""
    stages = split_layers(shape.num_layers, layout.pp * layout.chunks)
    held = stages_of_rank(pp_rank, layout.pp, layout.chunks, layout.style)
    dense_layers, expert_layers = _layer_counts(shape, stages, held)
    has_head = len(stages) - 1 in held
    ends = (shape.embedding_params if 0 in held else 0) + (
        shape.head_params if has_head and not (shape.tied and 0 in held) else 0
    )
    always = dense_layers * shape.dense_layer_params + expert_layers * shape.always_params + ends
    routed = expert_layers * shape.routed_params / layout.ep
    shards = layout.state_shards
    weights, gradients, optimizer = _state_bytes(always / layout.tp, shards, layout, habits)
    if routed:
        more = _state_bytes(routed / layout.tp, max(1, shards // layout.ep), layout, habits)
        weights, gradients, optimizer = weights + more[0], gradients + more[1], optimizer + more[2]
    if layout.cpu_offload:
        # The host holds the shards: of weights with ZeRO 3, of gradients from ZeRO 2 on.
        weights, gradients, optimizer = weights * (layout.zero != 3), gradients * (layout.zero < 2), 0.0
    if layout.zero == 3 and (shards > 1 or layout.cpu_offload):
        # Two layers are whole at a time: the one that computes and the one that is fetched.
        largest = shape.always_params + shape.routed_params / layout.ep if routed else shape.dense_layer_params
        weights += 2 * largest / layout.tp * layout.element_bytes
    activations = _activation_bytes(shape, layout, pp_rank, (dense_layers, expert_layers), habits)
    logits_bytes = habits.logits_bytes if layout.precision != "fp32" else 12
    logits = layout.tokens * shape.vocab / layout.tp * logits_bytes if has_head else 0.0
    axes = sum(size > 1 for size in (layout.tp, layout.pp, layout.dp, layout.sp, layout.ep))
    # Gradients that are summed in fp32 are reduced from that sum, without the buckets of ZeRO.
    summed = habits.bf16_sum_bytes > 0 and layout.precision == "bf16"
    buckets = habits.buffers_gib if layout.zero and not summed else 0.0
    fixed = _CPU_PROCESS_GIB if is_cpu else _CONTEXT_GIB + buckets + axes * _COMMUNICATOR_GIB
    reserve = fixed * GIB + (habits.fragmentation - 1.0) * (activations + logits)
    return RankBytes(weights, gradients, optimizer, activations, logits, reserve)


def _layer_counts(shape: Shape, stages: tuple[int, ...], held: tuple[int, ...]) -> tuple[int, int]:
    """Layers with a dense MLP and with experts that a rank holds."""
    layers = sum(stages[stage] for stage in held)
    if not shape.num_experts:
        return layers, 0
    dense = 0
    for stage in held:
        start = sum(stages[:stage])
        dense += max(0, min(shape.dense_layers - start, stages[stage]))
    return dense, layers - dense


def _state_bytes(params: float, shards: int, layout: Layout, habits: Framework) -> tuple[float, float, float]:
    """Weights, gradients, and optimizer state with the fp32 master copy."""
    half = layout.precision != "fp32"
    owners = shards if layout.zero >= 1 else 1
    weights = params * (2 if half else 4)
    if layout.zero == 3:
        weights = params * habits.zero3_weight_bytes / shards
    if not half and layout.zero in (0, 3):
        # In fp32 the optimizer works on the weights themselves unless ZeRO 1 or 2 keeps a shard beside them.
        weights = 0.0
    each = habits.gradient_bytes + (habits.bf16_sum_bytes if layout.precision == "bf16" else 0) if half else 4
    gradients = params * each / (shards if layout.zero >= 2 else 1)
    return weights, gradients, params * (12 + (habits.shard_bytes if half else 0)) / owners


def _activation_bytes(shape: Shape, layout: Layout, pp_rank: int, layers: tuple[int, int], habits: Framework) -> float:
    total = working = 0.0
    for count, experts in zip(layers, (False, True), strict=True):
        if not count:
            continue
        kept = layer_activation_bytes(shape, layout, habits, experts=experts)
        stored = kept
        if layout.recompute == "full":
            norm_tp = layout.tp if layout.sharded_norms else 1
            share = 1 / layout.every_kth
            stored = layout.tokens * shape.hidden * layout.element_bytes / norm_tp * share + kept * (1 - share)
            working = max(working, kept)
        total += stored * count
    # Gradients of the widest intermediate values while one layer runs backwards.
    width = (2 if shape.gated else 1) * max(shape.ffn, shape.dense_ffn) / layout.tp + 2 * shape.hidden
    transient = layout.tokens * layout.element_bytes * width
    embedding = layout.tokens * shape.hidden * layout.element_bytes if pp_rank == 0 else 0.0
    if layout.pp > 1:
        total += habits.stage_buffers * layout.tokens * shape.hidden * layout.element_bytes
    return total * in_flight(layout, pp_rank) + working + transient + embedding


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
    attention = e * (shape.q_width + 2.0 * shape.kv_width + shape.value_width) + 4.0 * shape.heads
    if shape.latent is not None:
        latent = shape.latent
        attention = e * (2.0 * shape.q_width + 2.0 * shape.value_width) + 4.0 * shape.heads
        around += 2.0 * e * (latent.q_rank + latent.kv_rank)
    materialised = not layout.flash and layout.recompute != "selective" if scores is None else scores
    if materialised:
        attention += shape.heads * layout.seq * (2.0 * e + 1.0 if habits.dropout else 1.5 * e)
    per_width = (4.0 if habits.fused == "eager" else 3.0) if shape.gated else 2.0
    width = float(shape.ffn if not shape.num_experts else shape.dense_ffn or shape.ffn)
    if experts:
        # Routed tokens are copied to their experts; inputs and outputs of the experts are kept.
        width = shape.ffn * (shape.experts_per_token + shape.shared_experts)
        around += 2.0 * e * shape.hidden * shape.experts_per_token / tp * norm_tp + 4.0 * shape.num_experts
    return layout.tokens * (around / norm_tp + (attention + e * per_width * width) / tp)


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
