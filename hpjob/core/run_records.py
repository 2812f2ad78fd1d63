"""Small records that a run leaves in its folder, read and written the same way everywhere.

Readers are tolerant: a file may be missing, or its last line torn by a crash.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpjob.core.run_dir import AttemptDir, RunDir

FailureKind = Literal["exception", "peer-lost", "killed", "hang", "preflight"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why one rank ended; ``failures/rank-NNNNN.json``."""

    rank: int
    node: str
    time: float
    """Seconds since the epoch."""
    kind: FailureKind
    """``peer-lost`` = the error only says that another rank went away; ``preflight`` = its node is not fit."""
    exception: str | None = None
    message: str = ""
    traceback: str | None = None
    step: int | None = None
    reported_by: int | None = None
    """Rank that wrote this, when the one that failed could not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Why the ranks of an attempt left; ``outcome.json``."""

    kind: str
    """``finished``, ``preempted`` or ``failed``."""
    step: int
    reason: str = ""
    time: float | None = None


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None when it is missing, torn or no object."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file; lines that cannot be read are left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = []
    for line in text.splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict):
            found.append(document)
    return found


def write_text_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write an object as indented JSON, atomically."""
    write_text_atomically(path, json.dumps(document, indent=2) + "\n")


def write_json_once(path: Path, document: Mapping[str, Any]) -> None:
    """Write an object as :func:`write_json` does unless the file is there by then: who wrote it first knew more."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.once")
    write_json(temporary, document)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError:  # a file system without links
        if not path.exists():
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def append_json_line(path: Path, document: Mapping[str, Any]) -> None:
    """Append one object to a JSON-lines file."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(document) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def read_outcome(attempt: AttemptDir) -> Outcome | None:
    """Return how the ranks left, or None when they had no time to say."""
    document = read_json(attempt.outcome)
    if document is None or "kind" not in document:
        return None
    try:
        return Outcome(
            kind=str(document["kind"]),
            step=int(document.get("step") or 0),
            reason=str(document.get("reason") or ""),
            time=None if document.get("time") is None else float(document["time"]),
        )
    except (TypeError, ValueError):
        return None


def read_failures(attempt: AttemptDir) -> list[Failure]:
    """Return the failures of an attempt, earliest first."""
    found = []
    for path in sorted(attempt.failures.glob("rank-*.json")):
        document = read_json(path)
        if document is None or "rank" not in document:
            continue
        try:
            found.append(_failure(document, path.stat().st_mtime))
        except (TypeError, ValueError):
            continue
    return sorted(found, key=lambda failure: failure.time)


def _failure(document: Mapping[str, Any], written_at: float) -> Failure:
    return Failure(
        rank=int(document["rank"]),
        node=str(document.get("node") or "?"),
        time=float(document.get("time") or written_at),
        kind=document.get("kind", "exception"),
        exception=document.get("exception"),
        message=str(document.get("message") or ""),
        traceback=document.get("traceback"),
        step=document.get("step"),
        reported_by=document.get("reported_by"),
    )


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """Return the failure that the others follow from: the earliest that does not merely report a lost peer."""
    ordered = sorted(failures, key=lambda failure: (failure.kind == "peer-lost", failure.time))
    return ordered[0] if ordered else None


def newest_checkpoint_step(run: RunDir) -> int:
    """Return the step of the newest complete checkpoint, 0 without one; checksums are not verified."""
    folders = run.checkpoints.glob("step-*")
    steps = (path.name.removeprefix("step-") for path in folders if (path / "manifest.json").is_file())
    return max((int(step) for step in steps if step.isdigit()), default=0)
