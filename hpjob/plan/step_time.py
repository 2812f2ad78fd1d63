"""Seconds of one optimizer step by kind.

Stages are priced layer by layer, the schedule is simulated operation by operation (or bounded by a formula
while thousands of candidates are compared), gradients and weights travel on the link that their group sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from hpjob.plan.constants import Framework, framework
from hpjob.plan.hardware import Hardware
from hpjob.plan.layer_time import LayerModel
from hpjob.plan.layout import Layout, split_layers
from hpjob.plan.schedule import makespan
from hpjob.plan.shape import Shape
from hpjob.plan.stage_times import StageTimes

_UPDATE_BYTES = 38.0
"""Moved for one parameter by clipping and AdamW: master weight, moments, gradient, new 16-bit weight."""
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

    def step(self, layout: Layout, *, simulate: bool = True) -> StepTime:
        """Price one layout; without ``simulate`` the bubble comes from a formula."""
        stages = self._stages(layout)
        m, pp, chunks = layout.num_microbatches, layout.pp, layout.chunks
        per_rank, comm_per_rank = self._per_rank(layout, stages)
        worst = max(range(pp), key=per_rank.__getitem__)
        busy = m * per_rank[worst]
        hop, blocking = self._hop(layout)
        if simulate and pp > 1:
            span = makespan(layout.style, pp, chunks, m, stages.times, hop, blocking)
            idle = (sum(per_rank) - per_rank[worst]) / _bubble_divisor(layout)
            ideal = min(span, busy + idle)
        else:
            idle = (sum(per_rank) - per_rank[worst]) / _bubble_divisor(layout)
            hops = 2 * (pp - 1) * hop * max(1, chunks - 1) + 2 * m * chunks * hop * blocking if pp > 1 else 0.0
            ideal, span = busy + idle, busy + idle + hops
        comm = m * comm_per_rank[worst]
        data = self._data_parallel(layout, stages, per_rank)
        optimizer = self._optimizer(layout)
        whole = span + data + optimizer
        nodes = max(1.0, layout.world_size / self.hardware.gpus_per_node)
        slack = self.habits.sharded_slack if layout.zero else self.habits.slack
        jitter = whole * (self.hardware.fit.jitter * log2(nodes) + slack)
        return StepTime(
            compute=busy - comm + jitter,
            bubble=max(0.0, ideal - busy),
            tp_comm=comm,
            pp_comm=max(0.0, span - ideal),
            dp_comm=data,
            optimizer=optimizer,
        )

    def _stages(self, layout: Layout) -> _Stages:
        """Seconds of a microbatch in every stage; layouts that differ only in zero 0 to 2 or dp share them."""
        gather = self._gather_layer(layout) if layout.zero == 3 else 0.0
        key = (*self.layers.key(layout), layout.pp, layout.chunks, gather)
        found = self._known_stages.get(key)
        if found is None:
            found = self._known_stages[key] = self._price_stages(layout, gather)
        return found

    def _price_stages(self, layout: Layout, gather: float) -> _Stages:
        s = self.shape
        counts = split_layers(s.num_layers, layout.pp * layout.chunks)
        dense, routed = _split_dense(s, counts)
        plain = self.layers.layer(layout)
        f, i, w = plain.passes()
        c = plain.comm_forward + plain.comm_backward
        forward, inputs = [n * f for n in dense], [n * i for n in dense]
        weights, comm = [n * w for n in dense], [n * c for n in dense]
        if s.num_expert_layers:
            layer = self.layers.layer(layout, experts=True)
            f, i, w = layer.passes()
            c = layer.comm_forward + layer.comm_backward
            forward = [a + n * f for a, n in zip(forward, routed, strict=True)]
            inputs = [a + n * i for a, n in zip(inputs, routed, strict=True)]
            weights = [a + n * w for a, n in zip(weights, routed, strict=True)]
            comm = [a + n * c for a, n in zip(comm, routed, strict=True)]
        if gather:
            # Weights arrive while the layer before computes; only what does not hide is seen.
            forward = [_overlapped(a, n * gather) for a, n in zip(forward, counts, strict=True)]
            inputs = [_overlapped(a + b, n * 2 * gather) - b for a, b, n in zip(inputs, weights, counts, strict=True)]
        # The loss of `zbv` sits with the embedding on the first rank, but it still ends the last stage.
        f, i, w = self.layers.head(layout)
        forward[-1], inputs[-1], weights[-1] = forward[-1] + f, inputs[-1] + i, weights[-1] + w
        embedding = self.hardware.traffic(6.0 * layout.tokens * s.hidden * layout.element_bytes)
        forward[0] += embedding / 2
        inputs[0] += embedding
        return _Stages(StageTimes(forward, inputs, weights), comm)

    def _per_rank(self, layout: Layout, stages: _Stages) -> tuple[list[float], list[float]]:
        t, pp, chunks = stages.times, layout.pp, layout.chunks
        total = [f + i + w for f, i, w in zip(t.forward, t.backward_input, t.backward_weight, strict=True)]
        if layout.style == "zbv":
            held = [(rank, 2 * pp - 1 - rank) for rank in range(pp)]
            return [total[a] + total[b] for a, b in held], [stages.comm[a] + stages.comm[b] for a, b in held]
        if chunks == 1:
            return total, stages.comm
        return (
            [sum(total[rank::pp]) for rank in range(pp)],
            [sum(stages.comm[rank::pp]) for rank in range(pp)],
        )

    def _hop(self, layout: Layout) -> tuple[float, float]:
        """Seconds from a stage to the next, and the part that keeps both from computing."""
        if layout.pp == 1:
            return 0.0, 0.0
        link = self.hardware.link(2, layout.dp * layout.sp * layout.tp)
        # Every tp rank sends its share; the receivers gather it inside the island.
        size = layout.tokens * self.shape.hidden * layout.element_bytes
        hop = link.send(size / layout.tp) * self.hardware.fit.hop
        if layout.tp > 1 and not layout.sharded_norms:
            hop += self.hardware.link(layout.tp, 1).ring(layout.tp, size)
        return hop, 1.0 - self.habits.pp_overlap

    def _gather_layer(self, layout: Layout) -> float:
        """Seconds to gather one layer's weights; the gradients' way back takes about as long."""
        shards = layout.state_shards
        if shards == 1:
            return 0.0
        params = self._mean_layer_params(layout)
        return self.hardware.link(shards, layout.tp).ring(shards, params * self.habits.gather_bytes)

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

    def _data_parallel(self, layout: Layout, stages: _Stages, per_rank: list[float]) -> float:
        """Exposed seconds of gradient reduction and weight gathering after ZeRO 0 to 2."""
        shards = layout.dp * layout.sp
        if shards == 1:
            return 0.0
        link = self.hardware.link(shards, layout.tp)
        if layout.zero == 3:
            # The first gather and the last reduction have nothing to hide behind.
            return 3 * self._gather_layer(layout)
        half = layout.precision != "fp32"
        reduce = self.habits.reduce_bytes if half else 4.0
        back = (self.habits.gather_bytes if half else 4.0) if layout.zero else reduce
        shared, experts = self._rank_params(layout)
        total = link.ring(shards, shared * reduce) + link.ring(shards, shared * back)
        if experts and shards > layout.ep:
            # An expert has a copy in every ep-th rank only.
            spread = self.hardware.link(shards // layout.ep, layout.tp * layout.ep)
            total += spread.ring(shards // layout.ep, experts * (reduce + back))
        if layout.zero and shards > layout.state_shards:
            total = self._grouped(layout, shared + experts, reduce, back)
        window = self.habits.dp_overlap * per_rank[0]
        return max(total - window, total * (1.0 - 0.9 * self.habits.dp_overlap))

    def _grouped(self, layout: Layout, params: float, reduce: float, back: float) -> float:
        """Seconds of reduction and gathering inside a group of shards, and of the sum across groups."""
        shards = layout.state_shards
        groups = layout.data_ranks // shards
        inside = self.hardware.link(shards, layout.tp).ring(shards, params * (reduce + back)) if shards > 1 else 0.0
        across = self.hardware.link(groups, layout.tp * shards).ring(groups, 2 * 4.0 * params / shards)
        return inside + across

    def _optimizer(self, layout: Layout) -> float:
        shared, experts = self._rank_params(layout)
        shards = layout.state_shards if layout.zero else 1
        params = shared / shards + experts / max(1, shards // layout.ep)
        if layout.cpu_offload:
            return params * _UPDATE_BYTES / _HOST_BYTES_PER_S
        return self.hardware.traffic(params * _UPDATE_BYTES) + self.hardware.fit.step_ms * 1e-3


def _split_dense(shape: Shape, counts: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layers of each stage with a dense MLP and with experts."""
    if not shape.num_experts:
        return counts, (0,) * len(counts)
    dense, start = [], 0
    for count in counts:
        dense.append(max(0, min(shape.dense_layers - start, count)))
        start += count
    return tuple(dense), tuple(count - own for count, own in zip(counts, dense, strict=True))


def _bubble_divisor(layout: Layout) -> float:
    if layout.style == "zbv":
        # Unequal times of the three passes leave about a third of the 1f1b bubble.
        return 3.0
    return float(layout.chunks)


def _overlapped(compute: float, transfer: float) -> float:
    """Compute with a transfer behind it: the longer one, plus what both take from each other."""
    return max(compute, transfer) + 0.12 * min(compute, transfer)
