"""Whether a process does anything at all: what tells a hang from something slow long before patience ends.

Compiling, loading from a slow file system, waiting for a compiler's processes may take many minutes without any
progress that could be counted, but something runs or waits for a file all the time. A process all of whose threads
sleep on purpose (a lock, a timer, a socket) does nothing that could end by itself.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpjob.core.environment import seconds_from_env
from hpjob.runtime.health.progress import Stillness

IDLE_S = 40.0
"""Who does nothing for so long while others wait hangs; ``HPJOB_IDLE_LIMIT_S`` sets another, 0 = never."""
_QUIET_S = 5.0
"""A process whose progress counts up is not looked at."""
_LITTLE_OF_MAIN = 1e-3
"""Share of a core that the main thread takes by polling; deleting files over a network takes more."""
_LITTLE_OF_OTHERS = 1e-2
"""Share of a core that a library's own watchers take."""
WATCHER_SUFFIX = "-watcher"
"""Names of the threads that look."""

_RUNNING = -2
# Numbers of the system calls in which a thread sleeps until another one, a timer or a socket wakes it. Those that touch
# files are not among them.
# fmt: off
_SLEEPS = {
    "x86_64": frozenset((
        7, 23, 34, 35, 42, 43, 44, 45, 46, 47, 61, 128, 130, 202, 219, 230, 232, 247, 270, 271, 281, 288, 441, 449, 455,
    )),
    "aarch64": frozenset((
        22, 72, 73, 95, 98, 101, 115, 128, 133, 137, 202, 203, 206, 207, 211, 212, 242, 260, 441, 449, 455,
    )),
}
# fmt: on


def limit_from_env() -> float:
    """Return for how long a rank that others wait for may do nothing, from ``HPJOB_IDLE_LIMIT_S``."""
    return seconds_from_env("HPJOB_IDLE_LIMIT_S", IDLE_S)


@dataclass(frozen=True, slots=True)
class _Signs:
    """One look at a process and its children."""

    at: float
    asleep: bool
    main_s: float
    """Time on a CPU of the main thread; of the others together with all children below."""
    others_s: float


class VitalSigns:
    """For how long a process has done nothing, told by somebody who looks regularly.

    Args:
        interval_s: Between two looks.
        limit_s: After how long that is a hang; 0 = never; None = from the environment.
        pid: Of another process; None = this one, less the threads that look.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        interval_s: float,
        limit_s: float | None = None,
        pid: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit_s = limit_from_env() if limit_s is None else limit_s
        self._pid = pid
        self._clock = clock
        self._stillness = Stillness(interval_s, clock)
        self._last: _Signs | None = None
        self._moves = 0

    def look(self, still_s: float) -> float:
        """Return for how many seconds the process has done nothing; 0 where that cannot be seen.

        Args:
            still_s: For how long it has made no progress: before a few seconds of that nobody needs to look.
        """
        if self.limit_s <= 0 or still_s < _QUIET_S:
            self._last = None
            return 0.0
        last, self._last = self._last, self._signs()
        self._moves += self._last is None or last is None or _moved(last, self._last)
        return self._stillness.look(self._moves)

    def _signs(self) -> _Signs | None:
        pid = os.getpid() if self._pid is None else self._pid
        sleeps = _SLEEPS.get(platform.machine(), frozenset())
        skipped = _watchers() if self._pid is None else set()
        asleep, main_s, others_s = True, 0.0, 0.0
        try:
            tasks = [task for task in Path(f"/proc/{pid}/task").iterdir() if int(task.name) not in skipped]
            for task in tasks:
                on_cpu_s, call = _task(task)
                if int(task.name) == pid:
                    main_s = on_cpu_s
                    asleep = asleep and call in sleeps
                else:
                    # A library's own watcher may just be awake; what its time on a CPU says counts.
                    others_s += on_cpu_s
                    asleep = asleep and (call in sleeps or call == _RUNNING)
        except (OSError, ValueError, IndexError):
            return None  # another kind of system
        # Looking for children costs more, and a process that is awake needs no more proof.
        if asleep:
            children_asleep, children_s = _children(pid)
            asleep, others_s = children_asleep, others_s + children_s
        return _Signs(self._clock(), asleep, main_s, others_s)


def _moved(before: _Signs, now: _Signs) -> bool:
    """Tell whether a process did anything between two looks."""
    passed_s = now.at - before.at
    if not (before.asleep and now.asleep):
        return True
    most_s = _LITTLE_OF_MAIN * passed_s, _LITTLE_OF_OTHERS * passed_s
    return now.main_s - before.main_s > most_s[0] or now.others_s - before.others_s > most_s[1]


def _task(task: Path) -> tuple[float, int]:
    """Return a thread's time on a CPU and the number of the system call that it is in.

    ``_RUNNING`` = it runs, or has just ended; another negative number = it waits for memory to be read.
    """
    try:
        on_cpu_s = int((task / "schedstat").read_text().split()[0]) / 1e9
        call = (task / "syscall").read_text().split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0, _RUNNING
    return on_cpu_s, _RUNNING if call == "running" else int(call)


def _watchers() -> set[int]:
    """Return the threads of this process that only look, the caller's among them."""
    threads = [thread for thread in threading.enumerate() if thread.name.endswith(WATCHER_SUFFIX)]
    return {threading.get_native_id(), *(thread.native_id or 0 for thread in threads)}


def _children(pid: int) -> tuple[bool, float]:
    """Return whether all processes below one sleep, and their time on a CPU."""
    asleep, seconds = True, 0.0
    try:
        for child in psutil.Process(pid).children(recursive=True):
            times = child.cpu_times()
            seconds += times.user + times.system
            asleep = asleep and child.status() in {psutil.STATUS_SLEEPING, psutil.STATUS_IDLE, psutil.STATUS_ZOMBIE}
    except psutil.Error:
        return False, 0.0  # one has just ended, or is another user's
    return asleep, seconds
