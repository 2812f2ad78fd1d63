"""How a rank fails: a record at once, then out, without waiting for anybody.

``os._exit`` is deliberate: destroying a process group whose peers are gone can hang for hours, and
every second that a failed rank lingers is a second for which all other GPUs wait.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import NoReturn

from hpjob.core.errors import EnvironmentProblemError, ExitCode, HpjobError
from hpjob.core.run_records import (
    Failure,
    FailureKind,
    Outcome,
    first_failure,
    newest_checkpoint_step,
    read_failures,
    write_json,
    write_json_once,
)
from hpjob.runtime.health.progress import Progress
from hpjob.runtime.health.stacks import all_stacks, main_thread_frame
from hpjob.runtime.rank import Rank

log = logging.getLogger(__name__)
_OTHER_REPORT_S = 60.0
"""How long a thread that wants to end the process waits for another one that is just saying why."""

# Texts of gloo, the store and NCCL when the other side went away or never came. They come as
# RuntimeError (or a subclass), so a connection error of a person's own code is not mistaken for one.
_PEER_LOST = re.compile(
    r"connection (was likely )?closed|connection reset|connection refused|broken pipe|socket closed"
    r"|application timeout caused pair closure|timed out waiting|socket timeout|socket has timed out|wait timeout"
    r"|failed to (recv|send)|connect(ion)? timeout|connectFullMesh failed"
    r"|nccl communicator was aborted|ncclRemoteError|remote process exited",
    re.IGNORECASE,
)


class PeerLostError(EnvironmentProblemError):
    """Another rank did not come or went away."""


class PreflightError(EnvironmentProblemError):
    """This rank's node is not fit to train."""


def classify(error: BaseException) -> FailureKind:
    """Tell whether an error is this rank's own or only says that another rank went away."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, PeerLostError):
            return "peer-lost"
        if isinstance(current, PreflightError):
            return "preflight"
        if isinstance(current, RuntimeError) and _PEER_LOST.search(str(current)):
            return "peer-lost"
        current = current.__cause__
    return "exception"


class FailureReporter:
    """Knows what this rank is doing, writes its failure record and ends the process.

    Attributes:
        step: Step being worked on; 0 = set-up.
        checkpoint_step: Newest checkpoint known to be complete; 0 = none.
        notify: Called with a short text when this rank fails, to tell the others faster than a
            shared file system does.
        progress: What the main thread is doing, for the hang watch.

    Args:
        rank: This process.
        progress: None = a hang is never suspected.
    """

    def __init__(self, rank: Rank, progress: Progress | None = None) -> None:
        self.rank = rank
        self.progress = progress or Progress(floor_s=0.0, long_s=float("inf"))
        self.step = 0
        self.checkpoint_step = 0
        self.notify: Callable[[str], None] | None = None
        self._reporting = threading.Lock()

    def note_checkpoint(self, step: int) -> None:
        """Take note of a complete checkpoint."""
        self.checkpoint_step = step

    def leave(self, error: BaseException) -> NoReturn:
        """Report an exception of the main thread and end the process."""
        text = "".join(traceback.format_exception(error))
        message, shown, code = str(error), text.rstrip(), ExitCode.BUG
        if isinstance(error, HpjobError):
            message, code = f"{error.message} (hint: {error.hint})", error.exit_code
            shown = f"error: {error.message}\nhint: {error.hint}"
        elif isinstance(error, KeyboardInterrupt):
            code = ExitCode.INTERRUPTED
        self._take_the_word()
        log.error("rank %d on %s failed\n%s", self.rank.rank, self.rank.node, shown)
        self._report(classify(error), type(error).__name__, message, text)
        leave_process(int(code))

    def leave_for_peer(self, why: str) -> NoReturn:
        """End the process because another rank failed; called from the watcher's thread."""
        self._take_the_word()
        main_thread = main_thread_frame()
        stack = "".join(traceback.format_stack(main_thread)) if main_thread else ""
        log.error("rank %d on %s ends: %s\n%s", self.rank.rank, self.rank.node, why, stack.rstrip())
        self._report("peer-lost", "PeerLostError", why, stack)
        leave_process(int(ExitCode.ENVIRONMENT))

    def leave_for_hang(self, why: str, name: str = "Hang") -> NoReturn:
        """End the process because no rank goes on; called from the watcher's thread.

        Args:
            why: What was found.
            name: ``Hang`` = the others wait for this rank; ``Deadlock`` = nobody is to blame.
        """
        self._take_the_word()
        stacks = all_stacks()
        log.error("rank %d on %s ends: %s\n%s", self.rank.rank, self.rank.node, why, stacks)
        faulthandler.dump_traceback(all_threads=True)
        self._report("hang", name, why, stacks)
        leave_process(int(ExitCode.ENVIRONMENT))

    def report_for(self, rank: int, *, kind: FailureKind, message: str, stacks: str | None, step: int | None) -> None:
        """Write the failure record of another rank that cannot do it."""
        self._write_record(
            Failure(
                rank=rank,
                node=self.rank.hosts[rank],
                time=time.time(),
                kind=kind,
                message=message,
                traceback=stacks,
                step=step,
                reported_by=self.rank.rank,
            )
        )

    def _take_the_word(self) -> None:
        """Let one thread say why this rank ends; another would end the process before that is written.

        The lock is never given back: who has it ends the process.
        """
        if not self._reporting.acquire(timeout=_OTHER_REPORT_S):
            leave_process(int(ExitCode.ENVIRONMENT))

    def _report(self, kind: FailureKind, exception: str, message: str, text: str) -> None:
        failure = Failure(
            rank=self.rank.rank,
            node=self.rank.node,
            time=time.time(),
            kind=kind,
            exception=exception,
            message=message,
            traceback=text,
            step=self.step,
        )
        self._write_record(failure)
        if self.notify is not None:
            self.notify(f"rank {self.rank.rank} on {self.rank.node} failed: {exception}: {message}"[:500])
        if self.rank.rank == 0:
            # Another rank may have said already what this one only noticed.
            first = first_failure(read_failures(self.rank.attempt)) or failure
            named = f"{first.exception}: {first.message}" if first.exception else first.message
            self._write_outcome(f"rank {first.rank} on {first.node}: {named}")

    def _write_record(self, failure: Failure) -> None:
        path = self.rank.attempt.failure(failure.rank)
        # Others may have said already why this rank ends; it must not say that it only lost them.
        knows_little = failure.kind == "peer-lost" or failure.reported_by is not None
        write = write_json_once if knows_little else write_json
        try:
            path.parent.mkdir(exist_ok=True)
            write(path, asdict(failure))
        except OSError as error:
            log.error("the failure record could not be written: %s", error)

    def _write_outcome(self, reason: str) -> None:
        if self.rank.attempt.outcome.exists():
            return
        # A save that ended in the background since the last step boundary is known only to the folder.
        step = max(self.checkpoint_step, newest_checkpoint_step(self.rank.run_dir))
        outcome = Outcome(kind="failed", step=step, reason=reason, time=time.time())
        try:
            write_json(self.rank.attempt.outcome, asdict(outcome))
        except OSError as error:
            log.error("the outcome could not be written: %s", error)


def leave_process(code: int) -> NoReturn:
    """End the process now: flushes what was printed, runs no clean-up of torch."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
