"""Seconds of one optimizer step by kind, from first principles.

Every layer is a handful of matrix products, one fused attention and memory-bound passes; every axis adds
its collectives on the link that its groups see; the pipeline adds its bubble.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from hpjob.plan.hardware import Hardware
from hpjob.plan.layout import Layout, split_layers, stages_of_rank
from hpjob.plan.shape import Shape

_DP_OVERLAP = 0.5
"""Part of the gradient traffic that hides behind the last microbatch's backward pass."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step; the parts add up to ``step``."""

    compute: float
    bubble: float
    tp_comm: float
    pp_comm: float
    dp_comm: float
    optimizer: float

    @property
    def step(self) -> float:
        return self.compute + self.bubble + self.tp_comm + self.pp_comm + self.dp_comm + self.optimizer


@dataclass(frozen=True, slots=True)
class _LayerTime:
    forward: float
    backward: float
    tp_comm: float
    """Collectives of forward and backward."""
    tp_comm_forward: float


def step_time(shape: Shape, layout: Layout, hardware: Hardware) -> StepTime:
    """Price one layout."""
    layer = _layer_time(shape, _layer_key(layout), hardware)
    head = _head_time(shape, layout.tokens, layout.tp, layout.precision, hardware)
    stages = split_layers(shape.num_layers, layout.pp * layout.chunks)
    per_layer = layer.forward + layer.backward
    comm_per_layer = layer.tp_comm
    if layout.recompute == "full":
        share = 1 / layout.every_kth
        per_layer += layer.forward * share
        comm_per_layer += layer.tp_comm_forward * share
    held = [stages_of_rank(rank, layout.pp, layout.chunks, layout.style) for rank in range(layout.pp)]
    counts = [sum(stages[stage] for stage in own) for own in held]
    last = len(stages) - 1
    compute = [count * per_layer + (head if last in own else 0.0) for count, own in zip(counts, held, strict=True)]
    comm = [count * comm_per_layer for count in counts]
    slots = [a + b for a, b in zip(compute, comm, strict=True)]
    worst = max(range(layout.pp), key=slots.__getitem__)
    m = layout.num_microbatches
    bubble = (sum(slots) - slots[worst]) / _bubble_divisor(layout)
    hop = _hop_time(shape, layout, hardware)
    dp = _data_parallel_time(shape, layout, hardware, counts[0])
    optimizer = _optimizer_time(shape, layout, hardware, max(counts))
    return StepTime(
        compute=m * compute[worst],
        bubble=bubble,
        tp_comm=m * comm[worst],
        pp_comm=hop,
        dp_comm=max(dp - _DP_OVERLAP * slots[0], dp * 0.2),
        optimizer=optimizer,
    )


def _bubble_divisor(layout: Layout) -> float:
    if layout.style == "zbv":
        # Unequal times of the three passes leave about a third of the 1f1b bubble.
        return 3.0
    return float(layout.chunks)


def _layer_key(layout: Layout) -> tuple[int, int, int, int, str | None, str]:
    return (layout.tokens, layout.seq, layout.tp, layout.sp, layout.sequence_mode, layout.precision)


@lru_cache(maxsize=8192)
def _layer_time(shape: Shape, key: tuple[int, int, int, int, str | None, str], hardware: Hardware) -> _LayerTime:
    tokens, seq, tp, sp, mode, precision = key
    half = precision != "fp32"
    e = 2 if half else 4
    qkv = (shape.q_width + 2 * shape.kv_width) // tp
    h, ffn = shape.hidden, shape.ffn // tp
    experts = max(1, shape.experts_per_token)
    products = [(tokens, qkv, h), (tokens, h, shape.q_width // tp)]
    products += [(tokens * experts, (2 if shape.gated else 1) * ffn, h), (tokens * experts, h, ffn)]
    forward = sum(_product_time(m, n, k, half, hardware) for m, n, k in products)
    backward = sum(
        _product_time(m, k, n, half, hardware) + _product_time(n, k, m, half, hardware) for m, n, k in products
    )
    # Causal attention: half of the score matrix.
    flops = 2.0 * tokens * seq * (shape.q_width // tp)
    peak = hardware.peak_half if half else hardware.peak_single
    c = hardware.constants
    forward += flops / (peak * c.attention_efficiency)
    backward += 2.5 * flops / (peak * c.attention_backward_efficiency)
    sharded = tp if mode in ("split_gather", "ring") else 1
    moved = tokens * e * (14 * h / sharded + 4 * shape.q_width / tp + 5 * experts * ffn)
    passes = moved / (hardware.memory_bandwidth * c.memory_efficiency) + 12 * c.launch_us * 1e-6
    forward += passes
    backward += 1.6 * passes
    comm = _axis_traffic(shape, tokens, tp, sp, mode, e, hardware)
    return _LayerTime(forward, backward, 2 * comm, comm)


def _axis_traffic(
    shape: Shape, tokens: int, tp: int, sp: int, mode: str | None, element_bytes: int, hardware: Hardware
) -> float:
    """Seconds of one layer's collectives over tp and sp in one direction."""
    seconds = 0.0
    if tp > 1:
        link = hardware.link(tp, 1)
        size = float(tokens * shape.hidden * element_bytes)
        seconds += 2 * (2 * (tp - 1) / tp * size / link.bandwidth + 2 * (tp - 1) * link.latency)
    if sp > 1:
        link = hardware.link(sp, tp)
        kv = 2 * tokens * shape.kv_width * element_bytes / tp
        if mode == "all_to_all":
            size = 2 * tokens * shape.q_width * element_bytes / tp + kv
            seconds += (sp - 1) / sp * size / link.bandwidth + 4 * link.latency
        else:
            # K and V go round; most of it hides behind the blocks of attention.
            seconds += 0.4 * (sp - 1) * (kv / link.bandwidth + link.latency)
    return seconds


def _product_time(m: int, n: int, k: int, half: bool, hardware: Hardware) -> float:
    """Seconds of an (m, k) x (k, n) product: waves of tiles, a ramp in k, or the memory's speed."""
    c = hardware.constants
    tiles = ceil(m / 128) * ceil(n / 128)
    waves = tiles / c.num_sms
    fill = waves / ceil(waves)
    edge = m * n / (tiles * 128 * 128)
    efficiency = c.gemm_efficiency * fill * edge * k / (k + c.gemm_ramp_k)
    peak = hardware.peak_half if half else hardware.peak_single
    e = 2 if half else 4
    moved = e * (m * k + k * n + m * n) / (hardware.memory_bandwidth * c.memory_efficiency)
    return max(2.0 * m * n * k / (peak * efficiency), moved) + c.launch_us * 1e-6


@lru_cache(maxsize=4096)
def _head_time(shape: Shape, tokens: int, tp: int, precision: str, hardware: Hardware) -> float:
    half = precision != "fp32"
    n, h = max(1, shape.vocab // tp), shape.hidden
    products = _product_time(tokens, n, h, half, hardware)
    products += _product_time(tokens, h, n, half, hardware) + _product_time(n, h, tokens, half, hardware)
    return products + 24 * tokens * n / (hardware.memory_bandwidth * hardware.constants.memory_efficiency)


def _hop_time(shape: Shape, layout: Layout, hardware: Hardware) -> float:
    """Exposed transfers between stages: warm-up, cool-down and, for chunks, a part of the steady state."""
    if layout.pp == 1:
        return 0.0
    link = hardware.link(2, layout.dp * layout.sp * layout.tp)
    size = layout.tokens * shape.hidden * layout.element_bytes / (layout.tp if layout.sharded_norms else 1)
    hop = size / link.bandwidth + link.latency
    crossings = 2 * (layout.pp - 1) + 2 * layout.num_microbatches * layout.chunks * 0.5
    return crossings * hop


def _data_parallel_time(shape: Shape, layout: Layout, hardware: Hardware, layers: int) -> float:
    shards = layout.dp * layout.sp
    if shards == 1:
        return 0.0
    link = hardware.link(shards, layout.tp)
    params = (layers * shape.layer_params / layout.ep + shape.embedding_params) / layout.tp
    gathers = layout.num_microbatches * 2 if layout.zero == 3 else 1
    reduces = layout.num_microbatches if layout.zero >= 2 else 1
    size = params * (4 * reduces + layout.element_bytes * gathers)
    return (shards - 1) / shards * size / link.bandwidth + 2 * (shards - 1) * link.latency


def _optimizer_time(shape: Shape, layout: Layout, hardware: Hardware, layers: int) -> float:
    params = (layers * shape.layer_params / layout.ep + shape.embedding_params) / layout.tp
    if layout.zero >= 1:
        params /= layout.dp * layout.sp
    return params * 34 / (hardware.memory_bandwidth * hardware.constants.memory_efficiency) + 1e-3
