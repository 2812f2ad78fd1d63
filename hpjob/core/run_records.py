"""Records that the ranks leave in a run folder, for whoever reads it: launcher, status, report.

Times are Unix seconds. Every file is written whole to a temporary name and renamed, so that a
reader sees a record or nothing.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Literal

from pydantic import Field

from hpjob.core.schema import Persisted

FailureKind = Literal["exception", "peer-lost", "killed", "hang"]
OutcomeKind = Literal["finished", "preempted", "failed"]


class Outcome(Persisted):
    """Why the ranks of an attempt left; written by rank 0 after the last save."""

    kind: OutcomeKind
    step: int
    """Step of the newest checkpoint that a restart can use; 0 = none."""
    reason: str
    time: float = Field(default_factory=time.time)


class FailureRecord(Persisted):
    """How one rank failed.

    ``peer-lost`` is secondary: the error only says that another rank went away. The first failing
    rank is the earliest of the other kinds, else the earliest of all.
    """

    rank: int
    node: str
    time: float = Field(default_factory=time.time)
    kind: FailureKind
    exception: str
    """Name of the exception's type; empty for a rank that was killed."""
    message: str
    traceback: str
    step: int
    """Step that the rank was working on; 0 = set-up."""


def first_failure(records: list[FailureRecord]) -> FailureRecord | None:
    """Return the record of the rank that failed first, or None without records."""
    primary = [record for record in records if record.kind != "peer-lost"]
    return min(primary or records, key=lambda record: record.time, default=None)


def read_failures(folder: Path) -> list[FailureRecord]:
    """Return the failure records of one attempt, in the order of ranks; unreadable ones are left out."""
    records = []
    for path in sorted(folder.glob("rank-*.json")):
        try:
            records.append(FailureRecord.model_validate_json(path.read_bytes()))
        except (OSError, ValueError):
            continue
    return records


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file under a temporary name, make it durable and rename it.

    Raises:
        OSError: No space, no permission; the file that was there before is untouched.
    """
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names inside a folder durable (a rename alone is not)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
