"""What a rank is doing and for how long it may do it without a sign of progress."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hpjob.core.environment import seconds_from_env

FLOOR_S = 30.0
"""A step may always take this long; ``HPJOB_HANG_FLOOR_S`` sets another, 0 switches the hang watch off."""
_SLOWEST_FACTOR = 5.0
_RECENT = 20
_EARLY_STEPS = 3
_EARLY_FACTOR = 2.0


def floor_from_env() -> float:
    """Return the least allowance of a step, from ``HPJOB_HANG_FLOOR_S``."""
    return seconds_from_env("HPJOB_HANG_FLOOR_S", FLOOR_S)


@dataclass(frozen=True, slots=True)
class Phase:
    """Something that a rank is busy with."""

    name: str
    step: int
    allowance_s: float
    """How long it may go on without a sign of progress."""


class Progress:
    """Written by the main thread, read by the watcher's.

    A normal step may take five times as long as the slowest of the last twenty, and never less than the floor.
    Everything that is slow by nature (set-up, the first step with its compilation, saves) has to be announced and
    gets the long allowance.

    Args:
        floor_s: Least allowance of a step; 0 = never overdue.
        long_s: Allowance of phases whose length nobody knows.
    """

    def __init__(self, floor_s: float, long_s: float) -> None:
        self._floor_s = floor_s
        self._long_s = long_s
        self._steps: deque[float] = deque(maxlen=_RECENT)
        self._first_step_s: float | None = None
        self.phase = Phase("set-up", 0, long_s)
        self.changes = 0
        """Counts phases, so that the same phase twice is progress too."""

    @property
    def watches(self) -> bool:
        """Whether lack of progress counts at all."""
        return self._floor_s > 0

    def enter(self, name: str, step: int, allowance_s: float | None = None) -> None:
        """Announce what comes now; without an allowance it gets the long one."""
        self.phase = Phase(name, step, self._long_s if allowance_s is None else allowance_s)
        self.changes += 1

    @contextmanager
    def during(self, name: str, allowance_s: float | None = None) -> Iterator[None]:
        """Announce something slow, and afterwards what was going on before."""
        before = self.phase
        self.enter(name, before.step, allowance_s)
        try:
            yield
        finally:
            self.enter(before.name, before.step, before.allowance_s)

    def begin_step(self, step: int) -> None:
        """Announce that the data of a step are read."""
        self.enter("reading data", step, self._step_allowance_s())

    def begin_compute(self, step: int) -> None:
        """Announce that a step has its data and is computed."""
        self.enter("first step" if self._first_step_s is None else "step", step, self._step_allowance_s())

    def end_step(self, duration_s: float) -> None:
        """Take note of how long a whole step took."""
        if self._first_step_s is None:
            self._first_step_s = duration_s
        else:
            self._steps.append(duration_s)
        self.enter("between steps", self.phase.step, self._step_allowance_s())

    def _step_allowance_s(self) -> float:
        if self._first_step_s is None:
            return self._long_s
        allowance_s = max(self._floor_s, _SLOWEST_FACTOR * max(self._steps, default=0.0))
        if len(self._steps) < _EARLY_STEPS:
            # The second step may compile again: for the optimizer's state, for another shape.
            allowance_s = max(allowance_s, _EARLY_FACTOR * self._first_step_s)
        return min(allowance_s, self._long_s)


class Stillness:
    """How long nothing has moved, counted by somebody who looks regularly.

    Time in which the process itself did not run (its job was suspended, its host was overloaded) is not counted:
    of the time between two looks only as much as a few intervals.

    Args:
        interval_s: Between two looks.
        clock: Monotonic seconds.
    """

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s = 3 * interval_s
        self._clock = clock
        self._looked_at = clock()
        self._mark: object = None
        self.still_s = 0.0

    def look(self, mark: object) -> float:
        """Return for how many seconds ``mark`` has been what it is."""
        now = self._clock()
        passed_s, self._looked_at = now - self._looked_at, now
        if mark != self._mark:
            self._mark, self.still_s = mark, 0.0
        else:
            self.still_s += min(passed_s, self._most_s)
        return self.still_s
