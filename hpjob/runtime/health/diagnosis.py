"""Who holds up the others: from what all ranks say of themselves to the ranks that did not arrive."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """What a rank last said of itself."""

    rank: int
    node: str
    step: int
    phase: str
    still_s: float
    """For how long it has seen no progress of its own."""
    waits: bool
    """Whether its main thread waits for other ranks."""
    where: str
    """Innermost function of its main thread."""
    idle_s: float = 0.0
    """For how long its process has done nothing at all."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Operations begun so far on each group of ranks; comparable among the members of a group."""

    def dump(self) -> str:
        """Return the state as text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str | bytes) -> RankState:
        """Read what :meth:`dump` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Which ranks hang."""

    ranks: tuple[int, ...]
    """Those that did not arrive; empty when all of them wait for each other."""
    message: str


def diagnose(states: Sequence[RankState], missing: Sequence[int] = ()) -> Verdict:
    """Find the ranks that did not arrive where others wait.

    A rank that has begun more operations on a group than another member waits for that one. The rank that others
    wait for, directly or through ranks that wait themselves, and that waits for nobody, is the one that hangs.

    Args:
        states: What the ranks said; all were asked when one saw no progress.
        missing: Ranks that have said nothing.
    """
    if missing:
        return Verdict(ranks=tuple(missing), message=f"{_names(missing)} never said where it is")
    behind, ahead = _behind_and_ahead(states)
    roots = [state for state in states if state.rank in behind - ahead]
    # Where a receive was posted ahead of time, a rank that is behind may itself be waiting in it.
    found = [state for state in roots if not state.waits] or roots or [state for state in states if not state.waits]
    if not found or len(found) == len(states) > 1:
        return Verdict(ranks=(), message=_deadlock(states))
    return Verdict(ranks=tuple(state.rank for state in found), message=_words(found, states))


def _behind_and_ahead(states: Sequence[RankState]) -> tuple[set[int], set[int]]:
    """Return the ranks that somebody waits for and the ranks that wait for somebody."""
    most: dict[str, int] = {}
    least: dict[str, int] = {}
    for state in states:
        for group, count in state.counts.items():
            most[group] = max(most.get(group, count), count)
            least[group] = min(least.get(group, count), count)
    behind = {s.rank for s in states if any(count < most[group] for group, count in s.counts.items())}
    ahead = {s.rank for s in states if any(count > least[group] for group, count in s.counts.items())}
    return behind, ahead


def _words(found: Sequence[RankState], states: Sequence[RankState]) -> str:
    shown = found[:_SHOWN]
    parts = [
        f"rank {state.rank} on {state.node} hangs: no progress for {state.still_s:.0f} s in step {state.step} "
        f"({state.phase}), in {state.where}"
        for state in shown
    ]
    if len(found) > _SHOWN:
        parts.append(f"and {len(found) - _SHOWN} more ranks")
    waiting = len(states) - len(found)
    if waiting:
        example = next(state for state in states if state not in found)
        parts.append(
            f"{waiting} rank{'s wait' if waiting > 1 else ' waits'} for it, such as {example.rank} in {example.where}"
        )
    return "; ".join(parts)


def _deadlock(states: Sequence[RankState]) -> str:
    state = max(states, key=lambda state: state.still_s)
    return (
        f"no rank has made progress for {state.still_s:.0f} s in step {state.step} ({state.phase}) and all wait for "
        f"each other, such as rank {state.rank} on {state.node} in {state.where}: a GPU or the network stands still, "
        "or the ranks disagree about what comes next"
    )


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:_SHOWN])
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank {shown}{more}"
