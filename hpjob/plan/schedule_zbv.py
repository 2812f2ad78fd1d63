"""The V-shaped zero-bubble schedule: by rule, or with few microbatches built greedily while it is simulated.

Greedily: rank r holds stages r and 2·pp - 1 - r. A rank starts whatever can start first: input gradients before
forwards, the way back before the way down; weight gradients fill the gaps, and come first where 2·pp
activations of a chunk are held, as much as 1f1b holds on its first rank: they are held until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import fsum

from hpjob.plan.schedule_zbv_regular import Op, regular_orders
from hpjob.plan.stage_times import StageTimes

_Action = tuple[float, int, int, str]
"""Start, priority, negated stage, kind: the smallest is done next."""


_GAP = 0.5
"""Part of a weight gradient for which a gap must last to be filled with it."""
_MAX_OPS = 3000
"""Operations that are worked out for a price; all of them are when a plan runs."""
_FINENESS = 16
"""Units of time that the mean forward takes when an order is made."""

StageCosts = tuple[tuple[int, int, int], ...]
"""Relative times of a microbatch's forward, input gradient and weight gradient in every stage.

They are whole numbers, so that all ranks and interpreters come to the same order.
"""


class _Rank:
    """What one rank has done and may do."""

    def __init__(self, rank: int, pp: int) -> None:
        self.stages = (rank, 2 * pp - 1 - rank)
        self.clock = 0.0
        self.held = 0
        self.weights: list[tuple[int, int]] = []
        self.order: list[Op] = []


class _Hops:
    """What a transfer costs, by the later one of its two stages; none leads to the first stage or from the last.

    Args:
        between: Seconds from every stage to the next.
        blocking: Part of them during which sender and receiver cannot compute.
    """

    def __init__(self, between: Sequence[float], blocking: float) -> None:
        self.wait_before = [0.0, *(hop * (1 - blocking) for hop in between), 0.0]
        self.stall_before = [0.0, *(hop * blocking for hop in between), 0.0]


class _Simulation:
    """State of all ranks."""

    def __init__(self, pp: int, num_microbatches: int, times: StageTimes, hops: _Hops) -> None:
        self.pp, self.last, self.times, self.hops = pp, 2 * pp - 1, times, hops
        self.ranks = [_Rank(rank, pp) for rank in range(pp)]
        # Arrival times of inputs and gradients in the order of microbatches, and how many were used.
        self.inputs: list[list[float]] = [[] for _ in range(2 * pp)]
        self.inputs[0] = [0.0] * num_microbatches
        self.gradients: list[list[float]] = [[] for _ in range(2 * pp)]
        self.forwards, self.backwards = [0] * (2 * pp), [0] * (2 * pp)

    def next_action(self, rank: _Rank) -> _Action | None:
        """Return what a rank does next, or None when it has to wait for others."""
        options: list[_Action] = []
        for stage in rank.stages:
            done = self.backwards[stage]
            if done < len(self.gradients[stage]):
                options.append((max(rank.clock, self.gradients[stage][done]), 0, -stage, "B"))
            done = self.forwards[stage]
            full = rank.held + len(rank.weights) >= 2 * self.pp
            # With nothing left to be freed only the way back up leads to it.
            may_hold_more = not full or (stage >= self.pp and not rank.weights)
            if may_hold_more and done < len(self.inputs[stage]):
                options.append((max(rank.clock, self.inputs[stage][done]), 1, -stage, "F"))
        best = min(options, default=None)
        if rank.weights:
            stage = rank.weights[0][0]
            if best is None or rank.clock + _GAP * self.times.backward_weight[stage] <= best[0]:
                return (rank.clock, 2, -stage, "W")
        return best

    def run(self, rank: _Rank, action: _Action) -> None:
        """Carry out an action and pass its result on."""
        start, _, negated, kind = action
        stage = -negated
        if kind == "W":
            rank.order.append(("W", *rank.weights.pop(0)))
            rank.clock = start + self.times.backward_weight[stage]
        elif kind == "F":
            self._forward(rank, stage, start)
        else:
            self._backward(rank, stage, start)

    def _forward(self, rank: _Rank, stage: int, start: float) -> None:
        rank.clock = start + self.times.forward[stage] + self.hops.stall_before[stage]
        rank.held += 1
        rank.order.append(("F", stage, self.forwards[stage]))
        self.forwards[stage] += 1
        if stage == self.last:
            self.gradients[stage].append(rank.clock)
        else:
            self.inputs[stage + 1].append(rank.clock + self.hops.wait_before[stage + 1])

    def _backward(self, rank: _Rank, stage: int, start: float) -> None:
        rank.clock = start + self.times.backward_input[stage] + self.hops.stall_before[stage + 1]
        rank.held -= 1
        rank.order.append(("B", stage, self.backwards[stage]))
        rank.weights.append((stage, self.backwards[stage]))
        self.backwards[stage] += 1
        if stage:
            self.gradients[stage - 1].append(rank.clock + self.hops.wait_before[stage])


def simulate_zbv(
    pp: int, num_microbatches: int, times: StageTimes, between: Sequence[float], blocking: float, *, own_order: bool
) -> float:
    """Return the seconds of the schedule; ``between`` has those from every stage to the next.

    See :func:`hpjob.plan.schedule.makespan` for the other arguments.
    """
    hops = _Hops(between, blocking)
    # The steady state is extended by what one more microbatch takes; it settles late.
    most = max(3 * pp, min(16 * pp, _MAX_OPS // (6 * pp)))
    count = min(num_microbatches, most)
    costs = stage_costs(times)
    span = _replay(zbv_orders(pp, count, costs), pp, times, hops)
    more = 0.0
    if count < num_microbatches:
        fewer = max(2 * pp, 3 * most // 4)
        shorter = _replay(zbv_orders(pp, fewer, costs), pp, times, hops)
        more = (num_microbatches - most) * (span - shorter) / (most - fewer)
    if not own_order:
        # A schedule that was made for these times is at least as good as the better one of the two.
        simulation = _simulate(pp, count, times, hops)
        span = min(span, max(rank.clock for rank in simulation.ranks))
    return span + more


def stage_costs(times: StageTimes) -> StageCosts:
    """Return the relative times of all stages that an order is made for."""
    unit = fsum(times.forward) / len(times.forward) / _FINENESS
    if not unit:
        return ((1, 1, 1),) * len(times.forward)
    columns = (times.forward, times.backward_input, times.backward_weight)
    forward, inputs, weights = ([max(1, round(time / unit)) for time in column] for column in columns)
    return tuple(zip(forward, inputs, weights, strict=True))


@lru_cache(maxsize=256)
def zbv_orders(pp: int, num_microbatches: int, costs: StageCosts | None = None) -> tuple[tuple[Op, ...], ...]:
    """Return what each rank computes in which order, with at most 2·pp + 1 activations of a chunk on a rank.

    Where the microbatches fill the order by rule it is that one; with fewer, the faster of it and a greedy one.

    Args:
        pp: Pipeline ranks.
        num_microbatches: Microbatches of one step.
        costs: What the order is made for, as far as the memory allows; None = all take equally long.
    """
    regular = regular_orders(pp, num_microbatches)
    if num_microbatches >= 2 * pp - 1:
        return regular
    costs = costs or ((1, 1, 1),) * (2 * pp)
    times, free = _relative(costs), _free_hops(pp)
    return min(_greedy(pp, num_microbatches, costs), regular, key=lambda orders: _replay(orders, pp, times, free))


def _greedy(pp: int, num_microbatches: int, costs: StageCosts) -> tuple[tuple[Op, ...], ...]:
    equal = ((1, 1, 1),) * (2 * pp)
    mean = tuple(max(1, round(sum(column) / len(column))) for column in zip(*costs, strict=True))
    for tried in (costs, (mean,) * (2 * pp)):
        made = _made_for(tried, pp, num_microbatches)
        if most_held(made) <= 2 * pp + 1:
            return made
    return _made_for(equal, pp, num_microbatches)


def _relative(costs: StageCosts) -> StageTimes:
    forward, inputs, weights = zip(*costs, strict=True)
    return StageTimes(forward, inputs, weights)


def _free_hops(pp: int) -> _Hops:
    return _Hops((0.0,) * (2 * pp - 1), 0.0)


def _made_for(costs: StageCosts, pp: int, num_microbatches: int) -> tuple[tuple[Op, ...], ...]:
    made = _simulate(pp, num_microbatches, _relative(costs), _free_hops(pp))
    return tuple(tuple(rank.order) for rank in made.ranks)


def most_held(orders: tuple[tuple[Op, ...], ...]) -> int:
    """Return the most activations of a chunk that a rank holds, those that wait for weight gradients included."""
    change = {"F": 1, "B": 0, "W": -1}
    return max(max(accumulate(change[kind] for kind, _, _ in order)) for order in orders)


def _simulate(pp: int, num_microbatches: int, times: StageTimes, hops: _Hops) -> _Simulation:
    simulation = _Simulation(pp, num_microbatches, times, hops)
    actions = [simulation.next_action(rank) for rank in simulation.ranks]
    for _ in range(3 * 2 * pp * num_microbatches):
        action, index = min((action, index) for index, action in enumerate(actions) if action is not None)
        simulation.run(simulation.ranks[index], action)
        # Only the rank itself and its neighbours see something new.
        for rank in range(max(0, index - 1), min(pp, index + 2)):
            actions[rank] = simulation.next_action(simulation.ranks[rank])
    return simulation


def _replay(orders: tuple[tuple[Op, ...], ...], pp: int, times: StageTimes, hops: _Hops) -> float:
    """Return when the last rank ends if every rank keeps to its order; ranks wait for what is not there yet."""
    last = 2 * pp - 1
    arrived: dict[Op, float] = {}
    clocks, positions = [0.0] * pp, [0] * pp
    waiting = list(range(pp))
    while waiting:
        for rank in waiting:
            clock, order, position = clocks[rank], orders[rank], positions[rank]
            while position < len(order):
                kind, stage, microbatch = op = order[position]
                if kind == "W":
                    clock += times.backward_weight[stage]
                elif (ready := 0.0 if kind == "F" and stage == 0 else arrived.get(op, -1.0)) < 0.0:
                    break
                elif kind == "F":
                    clock = max(clock, ready) + times.forward[stage] + hops.stall_before[stage]
                    after = ("F", stage + 1, microbatch) if stage < last else ("B", stage, microbatch)
                    arrived[after] = clock + hops.wait_before[stage + 1]
                else:
                    clock = max(clock, ready) + times.backward_input[stage] + hops.stall_before[stage + 1]
                    arrived["B", stage - 1, microbatch] = clock + hops.wait_before[stage]
                position += 1
            clocks[rank], positions[rank] = clock, position
        waiting = [rank for rank in waiting if positions[rank] < len(orders[rank])]
    return max(clocks)
