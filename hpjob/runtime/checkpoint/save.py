"""Saves a checkpoint in two phases: all ranks write, then rank 0 publishes with one rename.

The work runs in a thread of every rank; the ranks agree over the store. A failure on any rank is a failure of the
save on all: the partial folder goes away, the checkpoints that were there stay, and training goes on.

::

    rank 0                     the others
    make the partial folder
    write shards               write shards          each with its checksum, durably
    manifest, one rename                             the checkpoint is complete
    read back                  read back             is the disk's content what was meant?
    delete what is superfluous
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

import hpjob
from hpjob.plan.model import Plan
from hpjob.runtime.checkpoint.folder import CheckpointFolder
from hpjob.runtime.checkpoint.manifest import DATA_NAME, CheckpointFile, Kind, Manifest, Scalar, check_file
from hpjob.runtime.checkpoint.notes import SaveNotes
from hpjob.runtime.checkpoint.retention import Retention
from hpjob.runtime.checkpoint.shards import ShardPlan
from hpjob.runtime.checkpoint.write import Written, write_metadata, write_shards

log = logging.getLogger(__name__)
Tensors = Mapping[MetadataIndex, torch.Tensor]


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
    kind: Kind
    error: str | None
    """None = the checkpoint is complete."""
    duration_s: float
    """From the beginning to the rename, or to the failure."""
    size_bytes: int = 0
    write_s: float = 0.0
    """The slowest rank's time to write its shards."""
    deleted: tuple[int, ...] = ()
    cleanup_error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveTask:
    """What a save needs to know.

    Attributes:
        device: Where the tensors lie.
        urgent: Publish and no more: what is read back and deleted afterwards takes time that a job may not have.
        make_durable: Called on rank 0 before publishing, for records that must not be older than the checkpoint; may
            refuse by raising.
    """

    rank: int
    world_size: int
    device: torch.device
    folder: CheckpointFolder
    position: Position
    kind: Kind
    plan: Plan
    fingerprint: dict[str, Scalar]
    retention: Retention
    urgent: bool
    make_durable: Callable[[], None]


class BackgroundSave:
    """One save, from :meth:`start` on in its own thread.

    Args:
        task: What to save.
        shards: What this rank writes.
        tensors: Its tensors, which stay as they are until the save ends; or why there are none.
        notes: Exchange with the other ranks.
    """

    def __init__(self, task: SaveTask, shards: ShardPlan, tensors: Tensors | Exception, notes: SaveNotes) -> None:
        self._task, self._shards, self._tensors, self._notes = task, shards, tensors, notes
        self._rank, self._world = task.rank, task.world_size
        self._started = time.perf_counter()
        self._result: SaveResult | None = None
        self._own_files: list[CheckpointFile] = []
        self._thread = threading.Thread(target=self._run, name=f"save-{task.position.step}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> SaveResult:
        """Wait for the end, which all ranks see within a fraction of a second."""
        self._thread.join()
        return self._result or self._failed("the save ended without a result")

    def _run(self) -> None:
        try:
            if self._task.device.type == "cuda":
                torch.cuda.set_device(self._task.device)
            self._result = self._lead() if self._rank == 0 else self._follow()
        except Exception as error:  # the store went away: the attempt is about to end
            log.warning("save of step %d: %s", self._task.position.step, error)
            self._result = self._failed(_words(self._rank, error))

    def _lead(self) -> SaveResult:
        """Rank 0's part; whatever happens, the others hear of it."""
        folder, step = self._task.folder, self._task.position.step
        try:
            result = self._lead_to_name()
            if result.error is None and not self._task.urgent:
                result = self._tidy(result)
        except Exception as error:
            folder.abandon(step)
            result = self._failed(_words(0, error))
        self._notes.put("done", result)
        return result

    def _lead_to_name(self) -> SaveResult:
        problem = _attempt(0, lambda: self._task.folder.begin(self._task.position.step))
        self._notes.put("begun", problem)
        return self._publish(self._write()) if problem is None else self._failed(problem)

    def _follow(self) -> SaveResult:
        """Every other rank's part."""
        if self._notes.read("begun") is None:
            written = self._write()
            self._notes.put("written", written, rank=self._rank)
            if not self._task.urgent and self._notes.read("published") and not isinstance(written, str):
                self._notes.put("read back", self._read_back(written.files), rank=self._rank)
        result: SaveResult = self._notes.read("done")
        return result

    def _write(self) -> Written | str:
        """Write this rank's shards; return the failure in words."""
        try:
            if isinstance(self._tensors, Exception):
                raise self._tensors
            data = self._task.folder.partial(self._task.position.step) / DATA_NAME
            began = time.perf_counter()
            written = write_shards(data, self._shards.plan, self._tensors)
            return replace(written, duration_s=time.perf_counter() - began)
        except Exception as error:
            return _words(self._rank, error)

    def _publish(self, own: Written | str) -> SaveResult:
        """Collect what all ranks wrote, and give the checkpoint its name or delete what there is of it."""
        folder, step = self._task.folder, self._task.position.step
        all_ranks: list[Written | str] = [own]
        all_ranks += [self._notes.take("written", rank=rank) for rank in range(1, self._world)]
        problems = [written for written in all_ranks if isinstance(written, str)]
        written = [written for written in all_ranks if not isinstance(written, str)]
        manifest = None
        if not problems:
            try:
                manifest = self._commit(written)
            except Exception as error:
                problems = [_words(0, error)]
        if not self._task.urgent:
            self._notes.put("published", manifest is not None)
        if manifest is None:
            # Measured before the partial folder goes, when a full disk still shows.
            free = folder.free_mib()
            folder.abandon(step)
            more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
            room = "the folder is lost" if free is None else f"{free} MiB were free"
            return self._failed(f"{'; '.join(problems[:3])}{more} ({room})")
        return SaveResult(
            step=step,
            kind=self._task.kind,
            error=None,
            duration_s=time.perf_counter() - self._started,
            size_bytes=manifest.size_bytes,
            write_s=max(part.duration_s for part in written),
        )

    def _commit(self, written: list[Written]) -> Manifest:
        task = self._task
        data = task.folder.partial(task.position.step) / DATA_NAME
        if self._shards.metadata is None:
            raise RuntimeError("rank 0 has no description of the whole state")
        results: list[list[WriteResult]] = [part.results for part in written]
        files = [write_metadata(data, self._shards.metadata, results)]
        files += [file for part in written for file in part.files]
        unknown = {path.name for path in data.iterdir()} ^ {file.name for file in files}
        if unknown:
            raise OSError(f"files and manifest differ: {', '.join(sorted(unknown)[:5])}")
        manifest = self._manifest(files)
        task.make_durable()
        task.folder.commit(manifest)
        self._own_files = [*files[:1], *written[0].files]
        return manifest

    def _manifest(self, files: list[CheckpointFile]) -> Manifest:
        task, position = self._task, self._task.position
        return Manifest(
            step=position.step,
            kind=task.kind,
            attempt=position.attempt,
            plan=task.plan.summary,
            degrees=task.plan.degrees,
            world_size=self._world,
            num_samples=position.num_samples,
            lr=position.lr,
            fingerprint=task.fingerprint,
            files=tuple(files),
            hpjob_version=hpjob.__version__,
            torch_version=torch.__version__,
        )

    def _tidy(self, result: SaveResult) -> SaveResult:
        """Delete what the new checkpoint makes superfluous, once every rank has read its part back."""
        folder = self._task.folder
        try:
            answers = [self._read_back(self._own_files)]
            answers += [self._notes.take("read back", rank=rank) for rank in range(1, self._world)]
            damaged = [answer for answer in answers if answer is not None]
            if damaged:
                folder.set_aside(result.step)
                return self._failed(f"read back differently than written: {'; '.join(damaged[:3])}")
            deleted = folder.delete_superfluous(self._task.retention, self._task.position.step)
        except (OSError, TimeoutError) as error:
            return replace(result, cleanup_error=_words(0, error))
        return replace(result, deleted=tuple(deleted))

    def _read_back(self, files: list[CheckpointFile]) -> str | None:
        data = self._task.folder.complete(self._task.position.step) / DATA_NAME
        return next((problem for file in files if (problem := check_file(data, file))), None)

    def _failed(self, reason: str) -> SaveResult:
        duration_s = time.perf_counter() - self._started
        return SaveResult(step=self._task.position.step, kind=self._task.kind, error=reason, duration_s=duration_s)


def _attempt(rank: int, work: Callable[[], None]) -> str | None:
    """Do something and return how it failed."""
    try:
        work()
    except Exception as error:
        return _words(rank, error)
    return None


def _words(rank: int, error: Exception) -> str:
    return f"rank {rank}: {type(error).__name__}: {error}"
