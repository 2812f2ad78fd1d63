"""Memory of one rank by kind, for the habits of a framework.

Model states are 16-bit compute weights, a gradient buffer, and master weights with two moments, sharded
over dp x sp by ZeRO. Activations are what autograd keeps of a pre-norm layer, times the microbatches that
the schedule holds in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Literal

from hpjob.plan.activations import Peak, in_flight, layer_activation_bytes
from hpjob.plan.constants import Framework
from hpjob.plan.hardware import Hardware
from hpjob.plan.layout import Layout, stage_layers, stages_of_rank
from hpjob.plan.shape import Shape
from hpjob.recipe.model import RecomputePolicy

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


def rank_bytes(shape: Shape, layout: Layout, pp_rank: int, habits: Framework, *, is_cpu: bool = False) -> RankBytes:
    """Return the bytes of the ranks of one pipeline stage by kind."""
    return MemoryModel(shape, habits, is_cpu=is_cpu).rank(layout, pp_rank)


@dataclass(frozen=True, slots=True)
class _Part:
    """What a pipeline rank holds of a model."""

    shared: float
    """Parameters of one rank that all ranks of dp and sp have."""
    routed: float
    """Parameters of one rank that belong to its experts."""
    chunks: tuple[tuple[int, int], ...]
    """Layers with a dense MLP and with experts of every model chunk."""
    has_head: bool


class MemoryModel:
    """Prices the memory of layouts of one model; what they share is kept."""

    def __init__(self, shape: Shape, habits: Framework, *, is_cpu: bool = False) -> None:
        self.shape = shape
        self.habits = habits
        self.is_cpu = is_cpu
        self._parts: dict[tuple[object, ...], _Part] = {}
        self._kept: dict[tuple[object, ...], tuple[float, float]] = {}
        self._held: dict[tuple[Layout, tuple[int, ...]], list[list[float]]] = {}

    def rank(self, layout: Layout, pp_rank: int) -> RankBytes:
        """Return the bytes of the ranks of one pipeline stage by kind."""
        part = self._part(layout, pp_rank)
        weights, gradients, optimizer = self._states(part, layout)
        activations, logits = self._activations(part, layout, pp_rank)
        reserve = self._fixed(layout) + (self.habits.fragmentation - 1.0) * (activations + logits)
        return RankBytes(weights, gradients, optimizer, activations, logits, reserve)

    def worst(self, layout: Layout) -> RankBytes:
        """Return the bytes of the fullest rank."""
        return max((self.rank(layout, rank) for rank in self._full_ranks(layout)), key=lambda found: found.total)

    def totals(
        self, layout: Layout, zeros: Sequence[Literal[0, 1, 2, 3]], policies: Sequence[tuple[RecomputePolicy, int]]
    ) -> Iterator[list[float]]:
        """Yield, policy by policy, the bytes of the fullest rank for every ZeRO stage.

        Args:
            layout: Its own ZeRO stage and recomputation do not matter.
            zeros: ZeRO stages.
            policies: Recomputation and its every k-th layer.
        """
        ranks = [(rank, self._part(layout, rank)) for rank in self._full_ranks(layout)]
        states = self._states_of_ranks(layout, tuple(zeros))
        whole = layout if layout.recompute == "none" else layout._replace(recompute="none", every_kth=1)
        peaks = [(part, self._peak(part, whole, rank)) for rank, part in ranks]
        kept, slack = self._layers(whole), self.habits.fragmentation
        for recompute, k in policies:
            held = self._layers(whole._replace(recompute=recompute)) if recompute == "selective" else kept
            each = k if recompute == "full" else 0
            of_ranks = []
            for (part, peak), of_zero in zip(peaks, states, strict=True):
                layers, logits = peak.with_layers(part.chunks, held, each)
                activations = slack * (layers + logits)
                of_ranks.append([state + activations for state in of_zero])
            yield list(map(max, *of_ranks)) if len(of_ranks) > 1 else of_ranks[0]

    def states(self, layout: Layout, zeros: Sequence[Literal[0, 1, 2, 3]]) -> list[float]:
        """Return the bytes of states and context of the fullest rank for every ZeRO stage, without activations."""
        return [max(of_rank) for of_rank in zip(*self._states_of_ranks(layout, tuple(zeros)), strict=True)]

    def _states_of_ranks(self, layout: Layout, zeros: tuple[Literal[0, 1, 2, 3], ...]) -> list[list[float]]:
        """Bytes of states and context by rank and ZeRO stage; activations and a third microbatch change none."""
        kept = layout._replace(microbatch=0, num_microbatches=min(3, layout.num_microbatches), sequence_mode=None)
        found = self._held.get((kept, zeros))
        if found is None:
            staged = [layout._replace(zero=zero) for zero in zeros]
            parts = [self._part(layout, rank) for rank in self._full_ranks(layout)]
            found = [[fsum(self._states(part, one)) + self._fixed(one) for one in staged] for part in parts]
            self._held[kept, zeros] = found
        return found

    def _full_ranks(self, layout: Layout) -> tuple[int, ...]:
        """Pipeline ranks of which one is the fullest.

        The first has the embedding and most microbatches in flight, the last the logits; where the first has
        fewer layers it may be the second.
        """
        pp = layout.pp
        if pp == 1:
            return (0,)
        stages = stage_layers(self.shape.num_layers, layout)
        return (0, 1, pp - 1) if pp > 2 and stages[0] < max(stages) else (0, pp - 1)

    def _fixed(self, layout: Layout) -> float:
        """Bytes of context, communicators and buckets."""
        if self.is_cpu:
            return _CPU_PROCESS_GIB * GIB
        habits = self.habits
        axes = sum(size > 1 for size in (layout.tp, layout.pp, layout.dp, layout.sp, layout.ep))
        # Gradients that are summed in fp32 are reduced from that sum, without the buckets of ZeRO.
        summed = habits.bf16_sum_bytes > 0 and layout.precision == "bf16"
        buckets = habits.buffers_gib if layout.zero and not summed else 0.0
        return (_CONTEXT_GIB + buckets + axes * _COMMUNICATOR_GIB) * GIB

    def _part(self, layout: Layout, pp_rank: int) -> _Part:
        key = (pp_rank, layout.tp, layout.pp, layout.ep, layout.style, layout.chunks, layout.relief)
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = self._count(layout, pp_rank)
        return found

    def _count(self, layout: Layout, pp_rank: int) -> _Part:
        s, tp = self.shape, layout.tp
        stages = stage_layers(s.num_layers, layout)
        held = stages_of_rank(pp_rank, layout.pp, layout.chunks, layout.style)
        chunks = tuple(_dense_and_expert_layers(s, stages, stage) for stage in held)
        dense, experts = sum(chunk[0] for chunk in chunks), sum(chunk[1] for chunk in chunks)
        has_head = len(stages) - 1 in held
        ends = s.embedding_params if 0 in held else 0
        ends += s.head_params if has_head and not (s.tied and 0 in held) else 0
        shared = (dense * s.dense_layer_params + experts * s.always_params + ends) / tp
        # Key-value heads are repeated where tp has more ranks than there are heads.
        repeated = 2.0 * s.kv_width * s.hidden * (1 / s.kv_shards(tp) - 1 / tp) if s.latent is None else 0.0
        routed = experts * s.routed_params / layout.ep / tp
        return _Part(shared + (dense + experts) * repeated, routed, chunks, has_head)

    def _states(self, part: _Part, layout: Layout) -> tuple[float, float, float]:
        shards = layout.state_shards
        weights, gradients, optimizer = _state_bytes(part.shared, shards, layout, self.habits)
        if part.routed:
            more = _state_bytes(part.routed, max(1, shards // layout.ep), layout, self.habits)
            weights, gradients, optimizer = weights + more[0], gradients + more[1], optimizer + more[2]
        if layout.cpu_offload:
            # The host holds the shards: of weights with ZeRO 3, of gradients from ZeRO 2 on.
            weights, gradients, optimizer = weights * (layout.zero != 3), gradients * (layout.zero < 2), 0.0
        if layout.zero == 3 and (shards > 1 or layout.cpu_offload):
            # Two layers are whole at a time: the one that computes and the one that is fetched.
            weights += 2 * self._largest_layer(part, layout) / layout.tp * layout.element_bytes
        if self.habits.gradients == "lazy" and shards > 1 and _reduces_every(layout) and not layout.cpu_offload:
            # Whole sums of two layers, which take turns, and of one end of the model.
            gradients += 4.0 * (2 * self._largest_layer(part, layout) + self.shape.head_params) / layout.tp
        return weights, gradients, optimizer

    def _largest_layer(self, part: _Part, layout: Layout) -> float:
        s = self.shape
        return s.always_params + s.routed_params / layout.ep if part.routed else s.dense_layer_params

    def _layers(self, layout: Layout) -> tuple[float, float]:
        """Bytes that a layer with a dense MLP and one with experts keep of a microbatch."""
        key = (
            layout.tokens,
            layout.seq,
            layout.tp,
            layout.sharded_norms,
            layout.flash,
            layout.recompute == "selective",
            layout.precision,
        )
        found = self._kept.get(key)
        if found is None:
            dense, routed = (
                layer_activation_bytes(self.shape, layout, self.habits, experts=experts) if count else 0.0
                for count, experts in (
                    (self.shape.num_layers - self.shape.num_expert_layers, False),
                    (self.shape.num_expert_layers, True),
                )
            )
            found = self._kept[key] = dense, routed
        return found

    def _activations(self, part: _Part, layout: Layout, pp_rank: int) -> tuple[float, float]:
        """Bytes of activations at the peak, and of logits."""
        each = layout.every_kth if layout.recompute == "full" else 0
        return self._peak(part, layout, pp_rank).with_layers(part.chunks, self._layers(layout), each)

    def _peak(self, part: _Part, layout: Layout, pp_rank: int) -> Peak:
        s, e, tokens = self.shape, layout.element_bytes, layout.tokens
        hidden = float(tokens * s.hidden * e)
        logits = 0.0
        if part.has_head:
            each = self.habits.logits_bytes if layout.precision != "fp32" else 12
            logits = tokens * -(-s.vocab // layout.tp) * each
        return Peak(
            in_flight=in_flight(layout, pp_rank),
            stage_inputs=self.habits.stage_buffers * hidden if layout.pp > 1 else 0.0,
            layer_input=hidden / (layout.tp if layout.sharded_norms else 1),
            # Gradients of the widest intermediate values while one layer runs backwards.
            passing=tokens * e * ((2 if s.gated else 1) * max(s.ffn, s.dense_ffn) / layout.tp + 2 * s.hidden),
            embedded=hidden if pp_rank == 0 else 0.0,
            logits=logits,
        )


def _dense_and_expert_layers(shape: Shape, stages: tuple[int, ...], stage: int) -> tuple[int, int]:
    if not shape.num_experts:
        return stages[stage], 0
    dense = max(0, min(shape.dense_layers - sum(stages[:stage]), stages[stage]))
    return dense, stages[stage] - dense


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
    if habits.gradients == "lazy":
        each = _lazy_gradient_bytes(layout, shards)
    else:
        each /= shards if layout.zero >= 2 else 1
    gradients = params * each
    return weights, gradients, params * (12 + (habits.shard_bytes if half else 0)) / owners


def _lazy_gradient_bytes(layout: Layout, shards: int) -> float:
    """Bytes of a parameter's gradients while activations are at their peak.

    A single microbatch makes them while its activations go, several sum in fp32. ZeRO 0 reduces the sum itself, ZeRO 1
    a layer's after the other into chunks, from ZeRO-2 on microbatch by microbatch.
    """
    if shards == 1:
        return 0.0 if layout.num_microbatches == 1 else 4.0
    if layout.num_microbatches == 1:
        return 4.0 if layout.zero == 0 else 0.0
    if layout.zero >= 2:
        return 4.0 / shards
    return 8.0 if layout.zero == 0 else 4.0


def _reduces_every(layout: Layout) -> bool:
    """Whether our runtime keeps no whole gradients between microbatches."""
    return layout.zero >= 2 or (layout.zero == 1 and layout.num_microbatches == 1)
