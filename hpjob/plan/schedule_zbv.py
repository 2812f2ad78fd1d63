"""The V-shaped zero-bubble schedule, built greedily while it is simulated.

Rank r holds stages r and 2·pp - 1 - r. A rank starts whatever can start first: input gradients before
forwards, the way back before the way down; weight gradients fill the gaps. At most 2·pp activations of a
chunk are held by a rank, as much as 1f1b holds on its first one.
"""

from __future__ import annotations

from hpjob.plan.stage_times import StageTimes


class _Rank:
    """What one rank has done and may do."""

    def __init__(self, rank: int, pp: int) -> None:
        self.stages = (rank, 2 * pp - 1 - rank)
        self.limit = 2 * pp
        self.clock = 0.0
        self.held = 0
        self.weights: list[tuple[int, int]] = []
        self.order: list[Action] = []


Action = tuple[str, int, int]
"""Kind (``F`` forward, ``B`` input gradient, ``W`` weight gradient), stage, microbatch."""


def simulate_zbv(pp: int, num_microbatches: int, times: StageTimes, hop: float, blocking: float) -> float:
    """Return the seconds of the schedule; see :func:`hpjob.plan.schedule.makespan` for the arguments."""
    return max(rank.clock for rank in _run(pp, num_microbatches, times, hop, blocking))


def zbv_orders(pp: int, num_microbatches: int) -> list[list[Action]]:
    """Return what each rank computes in which order, where forward and both backward parts take equally long."""
    equal = (1.0,) * (2 * pp)
    times = StageTimes(forward=equal, backward_input=equal, backward_weight=equal)
    return [rank.order for rank in _run(pp, num_microbatches, times, 0.0, 0.0)]


def _run(pp: int, num_microbatches: int, times: StageTimes, hop: float, blocking: float) -> list[_Rank]:
    last = 2 * pp - 1
    wait, stall = hop * (1 - blocking), hop * blocking
    ranks = [_Rank(rank, pp) for rank in range(pp)]
    forward_at: list[list[float]] = [[0.0] * num_microbatches if stage == 0 else [] for stage in range(last + 1)]
    backward_at: list[list[float]] = [[] for _ in range(last + 1)]
    forwards, backwards = [0] * (last + 1), [0] * (last + 1)
    remaining = 3 * (last + 1) * num_microbatches

    def next_action(rank: _Rank) -> tuple[float, int, int, str] | None:
        """Start, priority, stage and kind of what the rank does next."""
        best: tuple[float, int, int, str] | None = None
        for stage in rank.stages:
            if backwards[stage] < len(backward_at[stage]):
                at = max(rank.clock, backward_at[stage][backwards[stage]])
                best = min(best or (at, 0, -stage, "B"), (at, 0, -stage, "B"))
            allowed = rank.held < rank.limit or stage >= pp
            if allowed and forwards[stage] < len(forward_at[stage]):
                at = max(rank.clock, forward_at[stage][forwards[stage]])
                best = min(best or (at, 1, -stage, "F"), (at, 1, -stage, "F"))
        if rank.weights:
            stage = rank.weights[0][0]
            if best is None or rank.clock + times.backward_weight[stage] <= best[0]:
                return (rank.clock, 2, -stage, "W")
        return best

    while remaining:
        actions = [(action, index) for index, rank in enumerate(ranks) if (action := next_action(rank))]
        (at, _, negative, kind), index = min(actions)
        rank, stage = ranks[index], -negative
        if kind == "W":
            rank.order.append(("W", *rank.weights.pop(0)))
            rank.clock = at + times.backward_weight[stage]
        elif kind == "F":
            # Stages pp-1 and pp are on one rank: nothing is sent between them.
            end = at + times.forward[stage] + (stall if stage not in (0, pp) else 0.0)
            rank.order.append(("F", stage, forwards[stage]))
            forwards[stage] += 1
            rank.held += 1
            rank.clock = end
            if stage == last:
                backward_at[stage].append(end)
            else:
                forward_at[stage + 1].append(end + (wait if stage + 1 != pp else 0.0))
        else:
            end = at + times.backward_input[stage] + (stall if stage not in (pp - 1, last) else 0.0)
            rank.order.append(("B", stage, backwards[stage]))
            rank.weights.append((stage, backwards[stage]))
            backwards[stage] += 1
            rank.held -= 1
            rank.clock = end
            if stage:
                backward_at[stage - 1].append(end + (wait if stage != pp else 0.0))
        remaining -= 1
    return ranks
