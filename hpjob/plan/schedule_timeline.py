"""When every rank of a pipeline does what: the simulated schedule as spans, for pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpjob.plan.layout import stages_of_rank
from hpjob.plan.schedule import interleaved, one_f_one_b
from hpjob.plan.schedule_zbv import stage_costs, zbv_orders
from hpjob.plan.schedule_zbv_regular import Op
from hpjob.plan.stage_times import StageTimes, between_stages
from hpjob.recipe.model import PipelineStyle


@dataclass(frozen=True, slots=True)
class Span:
    """One operation of one pipeline rank; seconds from the start of the step."""

    rank: int
    kind: str
    """``F`` forward, ``B`` backward (of the input only where ``W`` follows), ``W`` weight gradients."""
    stage: int
    microbatch: int
    begin: float
    end: float


def timeline(
    style: PipelineStyle,
    pp: int,
    chunks: int,
    num_microbatches: int,
    times: StageTimes,
    hops: float | Sequence[float],
    blocking: float = 0.0,
) -> tuple[Span, ...]:
    """Return all operations; see :func:`hpjob.plan.schedule.makespan` for the arguments."""
    replay = _Replay(style, pp, chunks, times, between_stages(style, pp, pp * chunks, hops), blocking)
    orders = _orders(style, pp, chunks, num_microbatches, times)
    positions, waiting = [0] * pp, list(range(pp))
    while waiting:
        for rank in waiting:
            while positions[rank] < len(orders[rank]) and replay.run(rank, orders[rank][positions[rank]]):
                positions[rank] += 1
        waiting = [rank for rank in waiting if positions[rank] < len(orders[rank])]
    return tuple(sorted(replay.spans, key=lambda span: (span.rank, span.begin, span.end)))


def _orders(style: PipelineStyle, pp: int, chunks: int, count: int, times: StageTimes) -> list[list[Op]]:
    """Orders of all ranks with stages in place of chunks."""
    if style == "zbv":
        return [list(order) for order in zbv_orders(pp, count, stage_costs(times))]
    orders = [one_f_one_b(pp, r, count) if style == "1f1b" else interleaved(pp, r, chunks, count) for r in range(pp)]
    return [
        [(kind, stages_of_rank(rank, pp, chunks, style)[chunk], microbatch) for kind, chunk, microbatch in order]
        for rank, order in enumerate(orders)
    ]


class _Replay:
    """Clocks of the ranks and arrival times of what operations wait for."""

    def __init__(
        self, style: PipelineStyle, pp: int, chunks: int, times: StageTimes, between: list[float], blocking: float
    ) -> None:
        self.times, self.blocking = times, blocking
        # By the later one of the two stages.
        self.hop_before = [0.0, *between, 0.0]
        self.split = style == "zbv"
        self.last = pp * chunks - 1
        self.arrived: dict[Op, float] = {}
        self.clocks = [0.0] * pp
        self.spans: list[Span] = []

    def run(self, rank: int, op: Op) -> bool:
        """Carry out an operation; False when its input is not there yet."""
        kind, stage, microbatch = op
        ready = self.arrived.get(op, 0.0 if kind == "W" or (kind == "F" and stage == 0) else -1.0)
        if ready < 0.0:
            return False
        begin = max(self.clocks[rank], ready)
        end = begin + self._seconds(kind, stage)
        self.clocks[rank] = end
        self.spans.append(Span(rank, kind, stage, microbatch, begin, end))
        if kind == "F" and stage == self.last:
            self.arrived["B", stage, microbatch] = end
        elif kind == "F":
            self.arrived["F", stage + 1, microbatch] = end + self.hop_before[stage + 1] * (1.0 - self.blocking)
        elif kind == "B" and stage:
            self.arrived["B", stage - 1, microbatch] = end + self.hop_before[stage] * (1.0 - self.blocking)
        return True

    def _seconds(self, kind: str, stage: int) -> float:
        t = self.times
        if kind == "W":
            return t.backward_weight[stage]
        if kind == "F":
            return t.forward[stage] + self.hop_before[stage] * self.blocking
        weight = 0.0 if self.split else t.backward_weight[stage]
        return t.backward_input[stage] + weight + self.hop_before[stage + 1] * self.blocking
