"""Stop requests: signals that only set a flag, and a stop file as a second channel.

The handlers do nothing but note the first signal, so a second one, or one that arrives while a
checkpoint is written, changes nothing. Import this module before torch: a signal may come early.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType

from hpjob.core.errors import EnvironmentProblemError

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
STOP_FILE_CODE = 1000
"""Code of the stop file; above every signal number."""
_POLL_INTERVAL_S = 1.0


class SupersededError(EnvironmentProblemError):
    """A later attempt has begun while this one still ran, on a node that Slurm had given up."""


class StopRequest:
    """What this process knows about a request to save and leave.

    Args:
        stop_file: Polled at a low rate when given (on one rank only, to spare the file system).
    """

    def __init__(self, stop_file: Path | None = None) -> None:
        self.stop_file = stop_file
        self.next_attempt: Path | None = None
        """Folder that exists once another start of the run has begun, which must not be disturbed."""
        self._owner = os.getpid()
        self._code = 0
        self._next_poll_s = 0.0

    def install(self) -> None:
        """Replace the handlers of all stop signals by one that sets the flag."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def code(self) -> int:
        """Return 0 for no request, else a number that :func:`describe` puts into words.

        Raises:
            SupersededError: The run is trained by a later attempt; this process may write nothing any more.
        """
        now = time.monotonic()
        if self.stop_file is not None and now >= self._next_poll_s:
            self._next_poll_s = now + _POLL_INTERVAL_S
            self.refuse_if_superseded()
            if not self._code and self.stop_file.exists():
                self._code = STOP_FILE_CODE
        return self._code

    def refuse_if_superseded(self) -> None:
        """Look whether this process may still write into the run's folder.

        Raises:
            SupersededError: It may not.
        """
        if self.next_attempt is not None and self.next_attempt.exists():
            raise SupersededError(
                f"attempt {self.next_attempt.name} trains this run now",
                hint="nothing is to be done: this node was cut off, and Slurm started the run elsewhere",
            )

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A forked child (a data loader's worker) inherits the handler; the request is not for it.
        if os.getpid() == self._owner and not self._code:
            self._code = number


def describe(code: int) -> str:
    """Return a stop code in words, such as ``signal SIGUSR2``."""
    return "stop file" if code == STOP_FILE_CODE else f"signal {signal.Signals(code).name}"
