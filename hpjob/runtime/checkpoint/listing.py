"""What stands in the ``checkpoints`` folder of a run, and whether it is whole. Reads files only, needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpjob.core.run_dir import RunDir
from hpjob.runtime.checkpoint.manifest import DATA_NAME, Manifest, check_file, read_manifest

State = Literal["complete", "incomplete", "damaged", "set aside", "being deleted"]
_STATES: dict[str, State] = {".partial": "incomplete", ".trash": "being deleted", ".damaged": "set aside"}

_FOLDER = re.compile(r"step-(\d+)(?:(?:\.\d+)?\.partial|\.trash|\.damaged)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEntry:
    """One folder of a checkpoint.

    Attributes:
        manifest: None where it cannot be read.
        problems: One line for each file that is not as it was written; with its path below ``path``.
        verified: Whether the checksum of every file was compared, not only its size.
    """

    path: Path
    step: int
    state: State
    manifest: Manifest | None
    problems: tuple[str, ...] = ()
    verified: bool = False


def list_checkpoints(run: RunDir, *, verify: bool = False) -> Iterator[CheckpointEntry]:
    """Yield all checkpoints of a run, oldest first.

    Args:
        run: The run.
        verify: Compare the checksum of every file of complete checkpoints.
    """
    if not run.checkpoints.is_dir():
        return
    found = []
    for path in run.checkpoints.iterdir():
        if (match := _FOLDER.fullmatch(path.name)) is not None:
            found.append((int(match[1]), path.suffix, path))
    for step, suffix, path in sorted(found):
        yield _complete(path, step, verify=verify) if not suffix else _other(path, step, _STATES[suffix])


def _complete(path: Path, step: int, *, verify: bool) -> CheckpointEntry:
    try:
        manifest = read_manifest(path, step)
    except (OSError, ValueError) as error:
        problem = f"manifest.json: {_words(error)}"
        return CheckpointEntry(path=path, step=step, state="damaged", manifest=None, problems=(problem,))
    data = path / DATA_NAME
    found = (check_file(data, file, sizes_only=not verify) for file in manifest.files)
    problems = tuple(f"{DATA_NAME}/{problem}" for problem in found if problem)
    return CheckpointEntry(
        path=path,
        step=step,
        state="damaged" if problems else "complete",
        manifest=manifest,
        problems=problems,
        verified=verify,
    )


def _other(path: Path, step: int, state: State) -> CheckpointEntry:
    try:
        manifest = read_manifest(path, step)
    except (OSError, ValueError):
        manifest = None
    return CheckpointEntry(path=path, step=step, state=state, manifest=manifest)


def _words(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return " ".join(str(error).split())[:200]
