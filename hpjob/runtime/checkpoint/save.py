"""Saves a checkpoint in two phases: all ranks write, then rank 0 publishes with one rename.

A failure on any rank is a failure on all: the partial folder goes away, the checkpoints that were
there stay, and training can go on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import hpjob
from hpjob.plan.model import Plan
from hpjob.runtime.agreement import AgreedError, on_every_rank, on_rank_zero
from hpjob.runtime.checkpoint.folder import CheckpointFolder
from hpjob.runtime.checkpoint.manifest import DATA_NAME, CheckpointFile, Manifest, Scalar, describe_file
from hpjob.runtime.checkpoint.random_state import random_state
from hpjob.runtime.checkpoint.state import STEP_KEY, SavedState, step_tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where training stands."""

    step: int
    num_samples: int
    lr: float
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveResult:
    """How a save went, the same on all ranks."""

    step: int
    error: str | None
    """None = the checkpoint is complete."""
    duration_s: float
    size_bytes: int = 0
    manifest: Manifest | None = None


def save_checkpoint(
    folder: CheckpointFolder, engine: SavedState, position: Position, plan: Plan, fingerprint: dict[str, Scalar]
) -> SaveResult:
    """Write and publish the checkpoint of a step. A collective of all ranks.

    Raises:
        RuntimeError: A rank went away. Failures to write are returned, not raised.
    """
    started = time.perf_counter()
    step = position.step
    try:
        on_rank_zero(lambda: folder.begin(step))
        files = _write(folder.partial(step) / DATA_NAME, engine, step)
        manifest = on_rank_zero(lambda: _publish(folder, _manifest(position, plan, fingerprint, files)))
    except AgreedError as error:
        # Measured before the partial folder goes, when a full disk still shows.
        free = on_rank_zero(folder.free_mib)
        on_rank_zero(lambda: folder.abandon(step))
        reason = f"{error} ({free} MiB were free)"
        return SaveResult(step=step, error=reason, duration_s=time.perf_counter() - started)
    return SaveResult(
        step=step,
        error=None,
        duration_s=time.perf_counter() - started,
        size_bytes=manifest.size_bytes,
        manifest=manifest,
    )


def _write(data: Path, engine: SavedState, step: int) -> list[CheckpointFile]:
    """Write all shards and return every file with its checksum, each hashed by the rank that wrote it."""
    rank = dist.get_rank()
    state: dict[str, Any] = {**engine.state_dict(), **random_state(rank), STEP_KEY: step_tensor(step)}
    try:
        # A writer that raises on one rank raises CheckpointException on all; anything else means
        # that the collectives themselves broke.
        save(state, storage_writer=_Writer(data, single_file_per_rank=True, sync_files=True))
    except CheckpointException as error:
        raise AgreedError(_reason(error)) from None
    by_rank = on_every_rank(lambda: [describe_file(path) for path in _own_files(data, rank)])
    return [file for files in by_rank for file in files]


class _Writer(FileSystemWriter):
    """Reports the operating system's error where torch's archive writer hides it behind its own."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shards.

        Raises:
            OSError: No space, no permission.
        """
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise _first_cause(error) from None


def _first_cause(error: BaseException) -> BaseException:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause or error


def _own_files(data: Path, rank: int) -> list[Path]:
    """Files that DCP wrote on this rank; its ``.metadata`` is rank 0's."""
    own = sorted(data.glob(f"__{rank}_*"))
    return [data / ".metadata", *own] if rank == 0 else own


def _manifest(position: Position, plan: Plan, fingerprint: dict[str, Scalar], files: list[CheckpointFile]) -> Manifest:
    return Manifest(
        step=position.step,
        attempt=position.attempt,
        plan=plan.summary,
        degrees=plan.degrees,
        world_size=dist.get_world_size(),
        num_samples=position.num_samples,
        lr=position.lr,
        fingerprint=fingerprint,
        files=tuple(files),
        hpjob_version=hpjob.__version__,
        torch_version=torch.__version__,
    )


def _publish(folder: CheckpointFolder, manifest: Manifest) -> Manifest:
    data = folder.partial(manifest.step) / DATA_NAME
    unknown = {path.name for path in data.iterdir()} ^ {file.name for file in manifest.files}
    if unknown:
        raise OSError(f"files and manifest differ: {', '.join(sorted(unknown)[:5])}")
    folder.commit(manifest)
    return manifest


def _reason(error: CheckpointException) -> str:
    failures = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()]
    return "; ".join(failures[:3]) + (f"; and {len(failures) - 3} more" if len(failures) > 3 else "")
