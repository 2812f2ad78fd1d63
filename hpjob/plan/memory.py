"""Memory of one rank by kind.

Model states follow the runtime: bf16 compute weights with fp32 master, gradients and moments, sharded
over dp x sp by ZeRO. Activations follow what autograd keeps of a pre-norm layer with a gated MLP.
"""

from __future__ import annotations

from hpjob.plan.hardware import Hardware
from hpjob.plan.layout import Layout, split_layers, stages_of_rank
from hpjob.plan.model import MemoryEstimate
from hpjob.plan.shape import Shape

GIB = 2**30
_CONTEXT_GIB = 1.4
"""CUDA context, NCCL buffers, cuBLAS workspace."""
_CPU_PROCESS_GIB = 0.6
"""Interpreter and libraries of a rank on CPU cores."""
_FRAGMENTATION = 1.05
_LOGITS_BYTES = 10
"""A logit in bf16, its fp32 copy and its fp32 gradient."""
USABLE_FRACTION = 0.94
"""What a plan may fill: the rest absorbs the estimate's error."""


def memory_limit_gib(hardware: Hardware) -> float:
    """Return what a plan may fill of one GPU."""
    return round(hardware.memory_gib * USABLE_FRACTION, 2)


def rank_memory(shape: Shape, layout: Layout, pp_rank: int, *, is_cpu: bool = False) -> MemoryEstimate:
    """Return the peak memory of the ranks of one pipeline stage."""
    stages = split_layers(shape.num_layers, layout.pp * layout.chunks)
    held = stages_of_rank(pp_rank, layout.pp, layout.chunks, layout.style)
    layers = sum(stages[stage] for stage in held)
    params = _parameters(shape, layout, layers, held)
    weights, gradients, optimizer = _state_bytes(params, layout)
    gathered = 2 * shape.layer_params / layout.tp * layout.element_bytes if layout.zero == 3 else 0.0
    activations = _activation_bytes(shape, layout, pp_rank, layers)
    tokens = layout.tokens
    has_head = len(stages) - 1 in held
    logits = tokens * shape.vocab / layout.tp * _LOGITS_BYTES if has_head else 0.0
    fixed = _CPU_PROCESS_GIB if is_cpu else _CONTEXT_GIB
    return MemoryEstimate(
        pp_rank=pp_rank,
        weights_gib=round(weights / GIB, 3),
        gradients_gib=round(gradients / GIB, 3),
        optimizer_gib=round(optimizer / GIB, 3),
        activations_gib=round(activations * _FRAGMENTATION / GIB, 3),
        logits_gib=round(logits / GIB, 3),
        workspace_gib=round(fixed + gathered / GIB, 3),
    )


def worst_total_gib(shape: Shape, layout: Layout, *, is_cpu: bool = False) -> float:
    """Return the largest total over the pipeline ranks that can be the worst: first, second and last."""
    candidates = {0, min(1, layout.pp - 1), layout.pp - 1}
    return max(rank_memory(shape, layout, rank, is_cpu=is_cpu).total_gib for rank in candidates)


def _parameters(shape: Shape, layout: Layout, layers: int, held: tuple[int, ...]) -> float:
    last = layout.pp * layout.chunks - 1
    per_layer = shape.layer_params
    if shape.num_experts and layout.ep > 1:
        per_layer = shape.attention_params + shape.num_experts * shape.mlp_params // layout.ep
    params = float(layers * per_layer)
    if 0 in held:
        params += shape.embedding_params
    if last in held and not (shape.tied and 0 in held):
        params += shape.head_params
    return params / layout.tp


def _state_bytes(params: float, layout: Layout) -> tuple[float, float, float]:
    """Weights, gradients, and optimizer state (with the fp32 master copy) in bytes."""
    half = layout.precision != "fp32"
    shards = layout.dp * layout.sp
    optimizer_shards = shards if layout.zero >= 1 else 1
    gradient_shards = shards if layout.zero >= 2 else 1
    weight_shards = shards if layout.zero == 3 else 1
    # In fp32 the gathered weights of ZeRO 1 and 2 are a copy beside the shard that the optimizer owns.
    weights = params * (2 if half else 4) / weight_shards if half or layout.zero in (1, 2) else 0.0
    return weights, 4 * params / gradient_shards, 12 * params / optimizer_shards


def _activation_bytes(shape: Shape, layout: Layout, pp_rank: int, layers: int) -> float:
    per_layer = layer_activation_bytes(shape, layout)
    stored = per_layer
    working = 0.0
    if layout.recompute == "full":
        norm_tp = layout.tp if layout.sharded_norms else 1
        stored_input = layout.tokens * shape.hidden * layout.element_bytes / norm_tp
        share = 1 / layout.every_kth
        stored = stored_input * share + per_layer * (1 - share)
        working = per_layer
    return stored * in_flight(layout, pp_rank) * layers + working


def layer_activation_bytes(shape: Shape, layout: Layout) -> float:
    """Bytes that autograd keeps of one layer for one microbatch without recomputation.

    Eager norms keep their input in fp32, the normalised value and the output; the rotary embedding keeps
    nothing; attention keeps q, k, v, its output and one row statistic a head; a gated MLP keeps gate,
    activated gate, up and their product.
    """
    tokens, e, tp = layout.tokens, layout.element_bytes, layout.tp
    norm_tp = tp if layout.sharded_norms else 1
    norms = 2 * shape.hidden * (4 + 2 * e) / norm_tp
    attention = (2 * shape.q_width + 2 * shape.kv_width) * e / tp
    attention += 4 * shape.heads / tp
    experts = max(1, shape.experts_per_token)
    mlp = experts * (4 if shape.gated else 2) * shape.ffn * e / tp
    routed = experts * 2 * shape.hidden * e if shape.num_experts else 0.0
    return tokens * (norms + attention + mlp + routed)


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
