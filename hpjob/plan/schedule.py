"""Pipeline schedules, simulated operation by operation.

A rank runs its operations in the order of the schedule; each waits for what it needs from a neighbour
plus the transfer. Operations: forward, backward for the input, backward for the weights (1f1b and
interleaved run the last two as one).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from hpjob.plan.schedule_zbv import simulate_zbv
from hpjob.plan.stage_times import StageTimes, between_stages

Op = tuple[str, int, int]
"""Kind (``F``, ``B``, ``W``), chunk of the rank, microbatch."""


def one_f_one_b(pp: int, rank: int, num_microbatches: int) -> list[Op]:
    """Return a rank's operations: warm-up forwards, then pairs, then the remaining backwards."""
    warmup = min(num_microbatches, pp - 1 - rank)
    ops: list[Op] = [("F", 0, i) for i in range(warmup)]
    for i in range(num_microbatches - warmup):
        ops += [("F", 0, warmup + i), ("B", 0, i)]
    return ops + [("B", 0, i) for i in range(num_microbatches - warmup, num_microbatches)]


def interleaved(pp: int, rank: int, chunks: int, num_microbatches: int) -> list[Op]:
    """Return a rank's operations when it holds several chunks; microbatches go in groups of ``pp``."""
    total = num_microbatches * chunks

    def at(index: int, forward: bool) -> tuple[int, int]:
        group, inside = divmod(index, pp * chunks)
        chunk, offset = divmod(inside, pp)
        return (chunk if forward else chunks - 1 - chunk), group * pp + offset

    warmup = min(total, 2 * (pp - 1 - rank) + (chunks - 1) * pp)
    ops: list[Op] = [("F", *at(i, True)) for i in range(warmup)]
    for i in range(total - warmup):
        ops += [("F", *at(warmup + i, True)), ("B", *at(i, False))]
    return ops + [("B", *at(i, False)) for i in range(total - warmup, total)]


def makespan(
    style: str,
    pp: int,
    chunks: int,
    num_microbatches: int,
    times: StageTimes,
    hops: float | Sequence[float],
    blocking: float = 0.0,
    *,
    own_order: bool = True,
) -> float:
    """Return the seconds from the first forward to the last backward.

    Args:
        style: ``1f1b``, ``interleaved`` or ``zbv``.
        pp: Pipeline ranks.
        chunks: Stages a rank holds.
        num_microbatches: Microbatches of one step.
        times: Seconds of a microbatch in each of the ``pp * chunks`` stages.
        hops: Seconds from each pipeline rank to the next, from the last to the first at the end; one number = all.
        blocking: Part of a hop during which the sender and receiver cannot compute.
        own_order: ``zbv`` keeps to the order of our runtime; else it may be one made for these times.
    """
    if pp == 1:
        total = fsum(times.forward) + fsum(times.backward_input) + fsum(times.backward_weight)
        return num_microbatches * total

    between = between_stages(style, pp, pp * chunks, hops)

    if style == "zbv":
        return simulate_zbv(pp, num_microbatches, times, between, blocking, own_order=own_order)

    def span(count: int) -> float:
        orders = [
            one_f_one_b(pp, rank, count) if style == "1f1b" else interleaved(pp, rank, chunks, count)
            for rank in range(pp)
        ]
        return _simulate(orders, pp, times, between, blocking)

    # The steady state repeats: simulate enough of it and extend it by what one more round takes.
    if num_microbatches <= 4 * pp:
        return span(num_microbatches)
    shorter, longer = span(2 * pp), span(3 * pp)
    return longer + (num_microbatches - 3 * pp) * (longer - shorter) / pp


def _simulate(orders: list[list[Op]], pp: int, times: StageTimes, between: list[float], blocking: float) -> float:
    """Run fixed orders; returns the time at which the last rank ends."""
    simulation = _Simulation(orders, pp, times, between, blocking)
    waiting = list(range(pp))
    while waiting:
        before = sum(simulation.positions)
        waiting = [rank for rank in waiting if not simulation.advance(rank)]
        if waiting and sum(simulation.positions) == before:
            raise ValueError("the schedule waits for itself")
    return max(simulation.clocks)


class _Simulation:
    """Clocks of all ranks, and when the input of every operation is there (-1 = not yet)."""

    def __init__(
        self, orders: list[list[Op]], pp: int, times: StageTimes, between: list[float], blocking: float
    ) -> None:
        count = sum(1 for kind, chunk, _ in orders[0] if kind == "F" and chunk == 0)
        stages = len(times.forward)
        self.orders, self.pp, self.last = orders, pp, stages - 1
        stalls = [hop * blocking for hop in between]
        self.waits = [hop * (1.0 - blocking) for hop in between]
        self.forward = [time + stall for time, stall in zip(times.forward, [0.0, *stalls], strict=True)]
        self.backward = [
            i + w + stall
            for i, w, stall in zip(times.backward_input, times.backward_weight, [*stalls, 0.0], strict=True)
        ]
        self.inputs = [[-1.0] * count for _ in range(stages + 1)]
        self.inputs[0] = [0.0] * count
        self.gradients = [[-1.0] * count for _ in range(stages + 1)]
        self.clocks, self.positions = [0.0] * pp, [0] * pp

    def advance(self, rank: int) -> bool:
        """Run a rank until it must wait; True when it has nothing left."""
        order, clock, position = self.orders[rank], self.clocks[rank], self.positions[rank]
        while position < len(order):
            kind, chunk, microbatch = order[position]
            stage = chunk * self.pp + rank
            is_forward = kind == "F"
            ready = (self.inputs if is_forward else self.gradients)[stage][microbatch]
            if ready < 0.0:
                break
            clock = max(clock, ready) + (self.forward if is_forward else self.backward)[stage]
            if not is_forward:
                # Nobody waits for the gradient of the first stage's input.
                self.gradients[stage - 1][microbatch] = clock + (self.waits[stage - 1] if stage else 0.0)
            elif stage == self.last:
                self.gradients[stage][microbatch] = clock
            else:
                self.inputs[stage + 1][microbatch] = clock + self.waits[stage]
            position += 1
        self.clocks[rank], self.positions[rank] = clock, position
        return position == len(order)
