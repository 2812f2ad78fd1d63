"""Logs of an attempt: which ones matter, and their ends."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.report.read import Attempt

_BLOCK_BYTES = 64 * 1024


def tail(path: Path, num_lines: int) -> list[str]:
    """Return the last lines of a file, reading no more of it than needed; an empty list when it is missing."""
    if num_lines <= 0:
        return []
    try:
        with path.open("rb") as stream:
            position = stream.seek(0, os.SEEK_END)
            data = b""
            while position > 0 and data.count(b"\n") <= num_lines:
                size = min(_BLOCK_BYTES, position)
                position -= size
                stream.seek(position)
                data = stream.read(size) + data
    except OSError:
        return []
    return data.decode("utf-8", errors="replace").splitlines()[-num_lines:]


def ranks_with_logs(attempt: AttemptDir) -> list[int]:
    """Return the ranks that left a log, in order."""
    names = (path.stem.removeprefix("rank-") for path in attempt.path.glob("rank-*.log"))
    return sorted(int(name) for name in names if name.isdigit())


@dataclass(frozen=True, kw_only=True, slots=True)
class LogPart:
    """The end of one attempt's log of a rank."""

    attempt: Attempt
    path: Path
    lines: list[str]


def joined_tail(attempts: Sequence[Attempt], rank: int, num_lines: int) -> list[LogPart]:
    """Return the last lines of a rank over all attempts, oldest first; an attempt that needs not be read is left out.

    Args:
        attempts: Oldest first; the newest is always part of the result when it has the log.
        rank: The rank.
        num_lines: In all.
    """
    parts: list[LogPart] = []
    for attempt in reversed(attempts):
        path = attempt.files.rank_log(rank)
        missing = num_lines - sum(len(part.lines) for part in parts)
        if parts and missing <= 0:
            break
        if path.exists():
            parts.append(LogPart(attempt=attempt, path=path, lines=tail(path, missing)))
    return parts[::-1]


def rank_to_show(attempt: Attempt) -> int | None:
    """Return the rank whose log says most: the first failing one, else rank 0, else any that has one."""
    ranks = ranks_with_logs(attempt.files)
    failure = attempt.first_failure
    if failure is not None and failure.rank in ranks:
        return failure.rank
    return ranks[0] if ranks else None


def job_log(run: RunDir, job_id: str, executor: str) -> Path:
    """Return the log of the job itself: what happened before and after the ranks ran."""
    return run.submitit / f"{job_id}_0_log.out" if executor == "local" else run.slurm_log(job_id)
