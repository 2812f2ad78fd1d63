"""Python reads this at its start where the folder is on PYTHONPATH: the first two attempts of a run then stand still.

They go on after a few steps only when they are told to save, however fast they train and however long Slurm takes to
preempt them. The ranks themselves are the real ones.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

HELD_ATTEMPTS, HELD_BOUNDARIES = 2, 8


def hold() -> None:
    """Let rank 0 look for a stop request at one of the step boundaries until there is one; the others wait for it."""
    from hpjob.runtime.signals import StopRequest

    original = StopRequest.code
    looks = 0

    def code(self: StopRequest) -> int:
        nonlocal looks
        looks += self.next_attempt is not None  # as only rank 0 has
        while not (found := original(self)) and looks > HELD_BOUNDARIES:
            time.sleep(0.02)
        return found

    StopRequest.code = code  # type: ignore[method-assign]


if "hpjob.runtime" in sys.orig_argv:
    attempt = Path(sys.orig_argv[sys.orig_argv.index("--attempt-dir") + 1])
    if int(attempt.name) < HELD_ATTEMPTS:
        hold()
