"""Seconds of one optimizer step by kind.

Stages are priced layer by layer, the schedule is simulated operation by operation (or bounded by a formula
while thousands of candidates are compared), gradients and weights travel on the link that their group sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import fsum, log2
from operator import add

from hpjob.plan.constants import Framework, framework
from hpjob.plan.hardware import Hardware, Link
from hpjob.plan.layer_time import LayerModel
from hpjob.plan.layout import Layout, stage_layers
from hpjob.plan.mesh_order import copy_group, data_group, expert_copies, link_of, shard_group, stage_links, tp_group
from hpjob.plan.schedule import makespan
from hpjob.plan.schedule_timeline import Span, timeline
from hpjob.plan.schedule_zbv import StageCosts, stage_costs
from hpjob.plan.shape import Shape
from hpjob.plan.stage_times import StageTimes

_HOST_BYTES_PER_S = 10e9
"""Of a rank that updates in the host's memory; assumed: the GPUs of a node share some hundred GB/s."""


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
class _Stages:
    times: StageTimes
    comm: list[float]
    """Exposed tp, sp and ep collectives of each stage, part of its times."""


class StepModel:
    """Prices layouts of one model on one kind of hardware."""

    def __init__(self, shape: Shape, hardware: Hardware, habits: Framework | None = None) -> None:
        self.shape = shape
        self.hardware = hardware
        self.habits = habits or framework("hpjob")
        self.layers = LayerModel(shape, hardware, self.habits)
        self._known_stages: dict[tuple[object, ...], _Stages] = {}
        self._known_work: dict[tuple[object, ...], float] = {}
        self._known_links: dict[tuple[int, int], tuple[tuple[Link, ...], list[int]]] = {}
        self._last: tuple[Layout, tuple[float, float, float, float, float]] | None = None

    def step(self, layout: Layout, *, simulate: bool = True) -> StepTime:
        """Price one layout; without ``simulate`` the bubble comes from a formula."""
        if simulate:
            busy, idle_free, span, comm, first = self._pipeline(layout, simulate=True)
        else:
            # Layouts that differ only in ZeRO 0 to 2 come one after the other and share all this.
            traffic = self.habits.gradient_traffic
            shares = layout.zero in (1, 2) and traffic(layout.zero) == traffic(0)
            key = layout._replace(zero=0) if shares else layout
            if self._last is None or self._last[0] != key:
                self._last = (key, self._pipeline(layout, simulate=False))
            busy, idle_free, span, comm, first = self._last[1]
        data = self._data_parallel(layout, first)
        optimizer = self._optimizer(layout)
        whole = span + data + optimizer
        slack = self.habits.sharded_slack if layout.zero else self.habits.slack
        jitter = whole * (self._waits(layout) + slack)
        return StepTime(
            compute=busy - comm + jitter,
            bubble=max(0.0, idle_free - busy),
            tp_comm=comm,
            pp_comm=max(0.0, span - idle_free),
            dp_comm=data,
            optimizer=optimizer,
        )

    def _waits(self, layout: Layout) -> float:
        """Part of a step that nodes wait for each other."""
        return self.hardware.fit.jitter * log2(max(1.0, layout.world_size / self.hardware.gpus_per_node))

    def _pipeline(self, layout: Layout, *, simulate: bool) -> tuple[float, float, float, float, float]:
        """Seconds of the busiest rank, with bubble, with transfers; of its collectives; of a microbatch of rank 0."""
        stages = self._stages(layout)
        m, pp, chunks = layout.num_microbatches, layout.pp, layout.chunks
        per_rank, comm_per_rank = self._per_rank(layout, stages)
        longest = max(per_rank)
        busy, comm = m * longest, m * comm_per_rank[per_rank.index(longest)]
        if pp == 1:
            return busy, busy, busy, comm, longest
        hops, blocking = self._hops(layout)
        ideal = busy + (fsum(per_rank) - longest) / _bubble_divisor(layout)
        if simulate:
            own = self.habits.is_own
            span = makespan(layout.style, pp, chunks, m, stages.times, hops, blocking, own_order=own)
            return busy, min(span, ideal), span, comm, per_rank[0]
        filling = 2 * fsum(hops[:-1]) * max(1, chunks - 1)
        # A rank that computes waits for what arrives from both sides.
        stalls = m * chunks * blocking * max(map(add, hops, (hops[-1], *hops))) if blocking else 0.0
        return busy, ideal, ideal + filling + stalls, comm, per_rank[0]

    def zbv_costs(self, layout: Layout) -> StageCosts | None:
        """Return what the order of operations is made for; None for schedules whose order is fixed."""
        return stage_costs(self._stages(layout).times) if layout.style == "zbv" else None

    def timeline(self, layout: Layout) -> tuple[Span, ...]:
        """Return when every pipeline rank does what."""
        times = self._stages(layout).times
        hops, blocking = self._hops(layout)
        return timeline(layout.style, layout.pp, layout.chunks, layout.num_microbatches, times, hops, blocking)

    def least(self, layout: Layout) -> float:
        """Return seconds that a step takes at least, whatever its ZeRO stage.

        Compute is spread evenly over the stages; the bubble comes on top.
        """
        traffic = self.habits.gradient_traffic
        layout = layout._replace(zero=0 if traffic(0) <= traffic(2) else 2)
        key = (*self.layers.key(layout), layout.every_kth)
        work = self._known_work.get(key)
        if work is None:
            work = self._known_work[key] = self._work(layout)
        # Every rank waits for the others to fill and drain at least once, whatever fills its gaps.
        rounds = layout.num_microbatches + (layout.pp - 1) / _bubble_divisor(layout)
        lost = self._waits(layout) + min(self.habits.slack, self.habits.sharded_slack)
        return rounds * work / layout.pp * (1.0 + lost)

    def _work(self, layout: Layout) -> float:
        """Seconds of a microbatch in all layers, the head and the loss."""
        s = self.shape
        total = 0.0
        for count, experts in ((s.num_layers - s.num_expert_layers, False), (s.num_expert_layers, True)):
            if count:
                forward, inputs, weights, again = self.layers.passes(layout, experts)
                total += count * (forward + inputs + weights + again / layout.every_kth)
        return total + fsum(self.layers.head(layout))

    def _stages(self, layout: Layout) -> _Stages:
        """Seconds of a microbatch in every stage; layouts that differ only in zero 0 to 2 or dp share them."""
        gather = self._gather_layer(layout) if layout.zero == 3 else 0.0
        key = (*self.layers.key(layout), layout.pp, layout.chunks, layout.relief, layout.every_kth, gather)
        found = self._known_stages.get(key)
        if found is None:
            found = self._known_stages[key] = self._price_stages(layout, gather)
        return found

    def _price_stages(self, layout: Layout, gather: float) -> _Stages:
        s = self.shape
        counts = stage_layers(s.num_layers, layout)
        kinds = list(zip(*_split_dense(s.num_experts > 0, s.dense_layers, counts), strict=True))
        # Few kinds of stages occur, however many there are.
        of = {kind: self._price_kind(layout, kind, gather) for kind in set(kinds)}
        forward, inputs, weights, comm = (list(column) for column in zip(*(of[kind] for kind in kinds), strict=True))
        # The loss of `zbv` sits with the embedding on the first rank, but it still ends the last stage.
        f, i, w = self.layers.head(layout)
        forward[-1], inputs[-1], weights[-1] = forward[-1] + f, inputs[-1] + i, weights[-1] + w
        embedding = self.hardware.traffic(6.0 * layout.tokens * s.hidden * layout.element_bytes)
        forward[0] += embedding / 2
        inputs[0] += embedding
        return _Stages(StageTimes(forward, inputs, weights), comm)

    def _price_kind(self, layout: Layout, kind: tuple[int, int], gather: float) -> tuple[float, float, float, float]:
        """Forward, input-gradient and weight-gradient seconds of a stage, and its exposed collectives.

        Args:
            layout: The stage's layout.
            kind: Layers with a dense MLP and with experts of the stage.
            gather: Seconds to gather a layer's weights.
        """
        forward = inputs = weights = comm = 0.0
        for n, experts in zip(kind, (False, True), strict=True):
            if not n:
                continue
            layer = self.layers.layer(layout, experts=experts)
            f, i, w, again = self.layers.passes(layout, experts)
            k = layout.every_kth if layout.recompute == "full" else 1
            forward += n * f
            inputs += n * i - (-n // k) * again
            weights += n * w
            comm += n * (layer.comm_forward + layer.comm_backward)
        if gather:
            n = sum(kind)
            # Weights arrive while the layer before computes; only what does not hide is seen.
            forward, backward = _overlapped(forward, n * gather), _overlapped(inputs + weights, n * 2 * gather)
            # Casting and copying into place is not hidden: a third when weights arrive, the rest on the way back.
            copy = n * self.hardware.traffic(self._mean_layer_params(layout) * self.habits.copy_bytes) / 3
            forward, inputs = forward + copy, backward - weights + 2 * copy
        return forward, inputs, weights, comm

    def _per_rank(self, layout: Layout, stages: _Stages) -> tuple[list[float], list[float]]:
        t, pp, chunks = stages.times, layout.pp, layout.chunks
        total = [f + i + w for f, i, w in zip(t.forward, t.backward_input, t.backward_weight, strict=True)]
        if layout.style == "zbv":
            held = [(rank, 2 * pp - 1 - rank) for rank in range(pp)]
            return [total[a] + total[b] for a, b in held], [stages.comm[a] + stages.comm[b] for a, b in held]
        if chunks == 1:
            return total, stages.comm
        return (
            [fsum(total[rank::pp]) for rank in range(pp)],
            [fsum(stages.comm[rank::pp]) for rank in range(pp)],
        )

    def _hops(self, layout: Layout) -> tuple[list[float], float]:
        """Seconds from each pipeline rank to the next, and the part that keeps both from computing."""
        if layout.pp == 1:
            return [0.0], 0.0
        key = (layout.pp, layout.data_ranks * layout.tp)
        found = self._known_links.get(key)
        if found is None:
            links = stage_links(self.hardware, layout)
            kinds = tuple(dict.fromkeys(links))
            found = self._known_links[key] = kinds, [kinds.index(link) for link in links]
        # Every tp rank sends its share; the receivers gather it inside the island.
        size = layout.tokens * self.shape.hidden * layout.element_bytes
        gather = 0.0
        if layout.tp > 1 and not layout.sharded_norms:
            gather = link_of(self.hardware, layout, tp_group(layout)).ring(layout.tp, size)
        seconds = [link.send(size / layout.tp) * self.hardware.fit.hop + gather for link in found[0]]
        return [seconds[kind] for kind in found[1]], 1.0 - self.habits.pp_overlap

    def _gather_layer(self, layout: Layout) -> float:
        """Seconds to gather one layer's weights; the gradients' way back takes about as long."""
        shards = layout.state_shards
        if shards == 1:
            return 0.0
        params = self._mean_layer_params(layout)
        return link_of(self.hardware, layout, shard_group(layout)).ring(shards, params * self.habits.gather_bytes)

    def _mean_layer_params(self, layout: Layout) -> float:
        s = self.shape
        dense = (s.num_layers - s.num_expert_layers) * s.dense_layer_params
        routed = s.num_expert_layers * (s.always_params + s.routed_params / layout.ep)
        return (dense + routed) / s.num_layers / layout.tp

    def _rank_params(self, layout: Layout) -> tuple[float, float]:
        """Parameters of the fullest rank before ZeRO: those that all ranks of dp share, and experts."""
        s = self.shape
        layers = -(-s.num_layers // layout.pp)
        ends = s.embedding_params * (2 if layout.pp == 1 and not s.tied else 1)
        experts = layers * s.num_expert_layers / s.num_layers * s.routed_params / layout.ep / layout.tp
        return layers * self._mean_layer_params(layout) - experts + ends / layout.tp, experts

    def _data_parallel(self, layout: Layout, first: float) -> float:
        """Exposed seconds of gradient reduction and weight gathering; ``first`` = a microbatch of the first rank."""
        shards = layout.dp * layout.sp
        if shards == 1:
            return 0.0
        link = link_of(self.hardware, layout, data_group(layout))
        if layout.zero == 3:
            # The first gather and the last reduction have nothing to hide behind.
            return 3 * self._gather_layer(layout)
        half = layout.precision != "fp32"
        reduce = self.habits.reduce_bytes if half else 4.0
        back = (self.habits.gather_bytes if half else 4.0) if layout.zero else reduce
        shared, experts = self._rank_params(layout)
        # ZeRO-2 keeps no whole gradients between microbatches, so each of them is reduced.
        times = layout.num_microbatches if layout.zero == 2 else 1
        total = times * link.ring(shards, shared * reduce) + link.ring(shards, shared * back)
        if experts and shards > layout.ep:
            # An expert has a copy in every ep-th rank only.
            spread = link_of(self.hardware, layout, expert_copies(layout))
            copies = shards // layout.ep
            moved = experts * (times * reduce + back)
            total += spread.ring(copies, moved * (2 if self._sums_whole_experts(layout, copies) else 1))
        if layout.zero and shards > layout.state_shards:
            total = self._grouped(layout, shared + experts, times * reduce, back)
        window = self.habits.dp_overlap * first * times
        return max(total - window, total * (1.0 - 0.9 * self.habits.dp_overlap))

    def _sums_whole_experts(self, layout: Layout, copies: int) -> bool:
        """Whether our runtime cuts experts along their features, and so sums them whole in both directions."""
        return layout.zero > 0 and self.habits.gradients == "lazy" and self.shape.num_experts // layout.ep % copies > 0

    def _grouped(self, layout: Layout, params: float, reduce: float, back: float) -> float:
        """Seconds of reduction and gathering inside a group of shards, and of the sum across groups."""
        shards = layout.state_shards
        groups = layout.data_ranks // shards
        inside = link_of(self.hardware, layout, shard_group(layout)).ring(shards, params * (reduce + back))
        across = link_of(self.hardware, layout, copy_group(layout)).ring(groups, 2 * 4.0 * params / shards)
        return inside + across

    def _optimizer(self, layout: Layout) -> float:
        shared, experts = self._rank_params(layout)
        shards = layout.state_shards if layout.zero else 1
        params = shared / shards + experts / max(1, shards // layout.ep)
        if layout.cpu_offload:
            # Gradients go to the host in fp32, from ZeRO-2 on for every microbatch, and new weights come back, with
            # ZeRO-3 for both passes of every microbatch.
            m = layout.num_microbatches
            times = (m if layout.zero >= 2 else 1) + (2 * m if layout.zero == 3 else 1)
            moved = times * 4.0 * params / self.hardware.host_bandwidth
            return params * self.habits.update_bytes / _HOST_BYTES_PER_S + moved
        return self.hardware.traffic(params * self.habits.update_bytes) + self.hardware.fit.step_ms * 1e-3


@lru_cache(maxsize=4096)
def _split_dense(
    has_experts: bool, dense_layers: int, counts: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layers of each stage with a dense MLP and with experts."""
    if not has_experts:
        return counts, (0,) * len(counts)
    dense, start = [], 0
    for count in counts:
        dense.append(max(0, min(dense_layers - start, count)))
        start += count
    return tuple(dense), tuple(count - own for count, own in zip(counts, dense, strict=True))


def _bubble_divisor(layout: Layout) -> float:
    if layout.style == "zbv":
        # Where the three passes take equally long, a sixth of what 1f1b leaves idle.
        return 6.0
    return float(layout.chunks)


def _overlapped(compute: float, transfer: float) -> float:
    """Compute with a transfer behind it: the longer one, plus what both take from each other."""
    return max(compute, transfer) + 0.12 * min(compute, transfer)
