"""Why the ranks of an attempt are gone: they saved, something around them broke, or they failed by themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpjob.core.run_dir import AttemptDir
from hpjob.core.run_records import Failure, first_failure, read_failures, read_outcome
from hpjob.slurm.blame import cause_beside_the_program
from hpjob.slurm.srun_log import TaskEnd

_LAUNCH_FAILURE = re.compile(
    r"srun: error: .*(?:Task launch for .* failed|Unable to create step|Unable to confirm allocation"
    r"|Communication connection failure|Socket timed out|Unable to contact slurm controller)"
)

_OWN_ENDS = ("Out Of Memory", "Segmentation fault", "Bus error", "Aborted", "Illegal instruction", "Floating point")
"""Ends that the same program would come to again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """Why the ranks are gone."""

    kind: Literal["saved", "around", "failed", "unclear"]
    """``around`` = nothing that the training itself did: a node, a process killed from outside."""
    words: str


def why_ended(attempt: AttemptDir, exit_code: int, ends: Sequence[TaskEnd], *, on_slurm: bool) -> Cause:
    """Judge from what ranks and launcher left.

    Args:
        attempt: The attempt; ranks that left no failure record themselves have got one.
        exit_code: Of srun, or of our own launcher.
        ends: How ranks ended, in the order seen.
        on_slurm: Whether srun was the launcher. Where it was not, a killed rank was killed by this machine, most
            often for want of memory, which would happen again.
    """
    # After a hang the others may say that they were told to save: srun ends them so.
    beside = cause_beside_the_program(attempt)
    if beside is not None:
        return Cause(kind="around", words=beside)
    outcome = read_outcome(attempt)
    if outcome is not None and outcome.kind == "preempted":
        return Cause(kind="saved", words=f"saved at step {outcome.step} ({outcome.reason})")
    failures = read_failures(attempt)
    own = first_failure(failure for failure in failures if failure.kind not in {"peer-lost", "killed"})
    first = next((end for end in ends if not end.after_abort), ends[0] if ends else None)
    if own is not None:
        return Cause(kind="failed", words=f"rank {own.rank} on {own.node} failed")
    if exit_code and first is not None and first.by_stop_signal:
        return Cause(kind="saved", words=f"told to stop during set-up ({first.what})")
    if failed_first(attempt, ends) or (first is not None and first.what.startswith(_OWN_ENDS)):
        return Cause(kind="failed", words="the ranks failed")
    if on_slurm and exit_code:
        around = _broken_around(attempt, exit_code, ends, failures)
        if around is not None:
            return Cause(kind="around", words=around)
    return Cause(kind="unclear", words="the ranks failed" if exit_code else "the ranks ended without saying why")


def failed_first(attempt: AttemptDir, ends: Sequence[TaskEnd]) -> bool:
    """Return whether a rank failed by itself before srun ended the others."""
    failures = {failure.rank: failure for failure in read_failures(attempt)}

    def lost_peer(end: TaskEnd) -> bool:
        return bool(end.ranks) and all(
            rank in failures and failures[rank].kind in {"peer-lost", "killed"} for rank in end.ranks
        )

    return any(end.exited and not end.after_abort and not lost_peer(end) for end in ends)


def _broken_around(
    attempt: AttemptDir, exit_code: int, ends: Sequence[TaskEnd], failures: Sequence[Failure]
) -> str | None:
    """Return what broke around the ranks in words, None when it is their own fault."""
    lost_nodes = [end.node for end in ends if not end.ranks]
    if lost_nodes:
        return f"node {', '.join(dict.fromkeys(lost_nodes))} failed"
    killed = next((end for end in ends if end.what.startswith("Killed") and not end.after_abort), None)
    if killed is not None:
        return f"rank {killed.ranks[0]} on {killed.node} was killed from outside (SIGKILL)"
    if any(failure.kind == "peer-lost" for failure in failures):
        return "ranks lost contact with a rank that left no trace: its node is gone or cut off"
    if _LAUNCH_FAILURE.search(_read(attempt.srun_log)):
        return "srun could not start the ranks"
    if not ends and not failures and exit_code > 128:
        return f"srun was ended from outside (signal {exit_code - 128})"
    if ends and all(end.after_abort for end in ends):
        return "srun was told to end the ranks"
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
