"""Writes this rank's shards in torch's format, with their checksum made on the way."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import get_crc32_options, set_crc32_options

from hpjob.runtime.checkpoint.manifest import CheckpointFile
from hpjob.runtime.checkpoint.shards import ResolvedPlanner

METADATA_NAME = ".metadata"
_LARGE = 1 << 20
"""Bytes that are worth a second thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What one rank wrote."""

    files: list[CheckpointFile]
    results: list[WriteResult]
    """Where each shard lies; for torch's metadata."""
    duration_s: float = 0.0


def write_shards(data: Path, plan: SavePlan, tensors: Mapping[MetadataIndex, torch.Tensor]) -> Written:
    """Write one durable file.

    Args:
        data: Folder, which exists.
        plan: This rank's part.
        tensors: What the plan names; must not change meanwhile.

    Raises:
        OSError: No space, no quota, no permission, no folder.
    """
    storage = _HashingFiles()
    writer = FileSystemWriter(data, single_file_per_rank=True, sync_files=True)
    writer.fs = storage
    try:
        with _no_second_checksum():
            results = writer.write_data(plan, ResolvedPlanner(tensors)).wait()
    except Exception as error:
        # torch's archive writer hides the operating system's error behind its own.
        raise _first_cause(error) from None
    return Written(files=storage.files, results=results)


def write_metadata(data: Path, metadata: Metadata, results: list[list[WriteResult]]) -> CheckpointFile:
    """Write torch's own description of all shards, durably.

    Raises:
        OSError: As :func:`write_shards`.
    """
    storage = _HashingFiles()
    writer = FileSystemWriter(data, sync_files=True)
    writer.fs = storage
    writer.finish(metadata, results)
    (file,) = storage.files
    return file.model_copy(update={"name": METADATA_NAME})


class _HashingFiles(FileSystem):
    """Files whose checksums are those of what was meant to be written, not of what a disk made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[CheckpointFile] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        # Unbuffered: a buffer would only copy what comes in large pieces.
        with Path(path).open(cast(Any, mode), buffering=0) as raw, ThreadPoolExecutor(1, "checksum") as hasher:
            stream = _HashingStream(raw, hasher)
            yield stream
        self.files.append(
            CheckpointFile(name=Path(path).name, size_bytes=stream.size, sha256=stream.digest.hexdigest())
        )


class _HashingStream:
    """The part of a binary stream that torch writes to; large pieces are hashed while they are written."""

    def __init__(self, raw: Any, hasher: ThreadPoolExecutor) -> None:
        self._raw = raw
        self._hasher = hasher
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        """Write everything; a short write of the operating system is continued."""
        view = memoryview(data).cast("B")
        hashed = self._hasher.submit(self.digest.update, view) if view.nbytes >= _LARGE else None
        try:
            rest = view
            while rest.nbytes:
                rest = rest[self._raw.write(rest) :]
        finally:
            # The memory is the caller's once this returns.
            if hashed is not None:
                hashed.result()
        if hashed is None:
            self.digest.update(view)
        self.size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Nothing is held back."""

    def fileno(self) -> int:
        return cast(int, self._raw.fileno())

    def close(self) -> None:
        self._raw.close()


@contextmanager
def _no_second_checksum() -> Iterator[None]:
    """Let torch's archives go without their CRC32, which would cost as much time as the SHA-256."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _first_cause(error: BaseException) -> BaseException:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause or error
