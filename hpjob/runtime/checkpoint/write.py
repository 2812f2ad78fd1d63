"""Writes this rank's shards in torch's format, with their checksum made on the way."""

from __future__ import annotations

import hashlib
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
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
"""Bytes that are not copied for the second thread."""


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
    storage = _HashingFiles(tensors.values())
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
    """Files whose checksums are those of what was meant to be written, not of what a disk made of it.

    Args:
        tensors: Memory that stays as it is until the file is closed: it is hashed in a second thread, while the
            operating system writes and syncs.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.files: list[CheckpointFile] = []
        self._stable = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.is_cpu and t.nbytes)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        # Unbuffered: a buffer would only copy what comes in large pieces.
        with ThreadPoolExecutor(1, "checksum") as hasher, Path(path).open(cast(Any, mode), buffering=0) as raw:
            stream = _HashingStream(raw, hasher, self._is_stable)
            yield stream
        self.files.append(
            CheckpointFile(name=Path(path).name, size_bytes=stream.size, sha256=stream.digest.hexdigest())
        )

    def _is_stable(self, view: memoryview) -> bool:
        begin = np.frombuffer(view, dtype=np.uint8).ctypes.data
        index = bisect_right(self._stable, (begin, sys.maxsize)) - 1
        return index >= 0 and begin + view.nbytes <= self._stable[index][1]


class _HashingStream:
    """The part of a binary stream that torch writes to."""

    def __init__(self, raw: Any, hasher: ThreadPoolExecutor, is_stable: Callable[[memoryview], bool]) -> None:
        self._raw, self._hasher, self._is_stable = raw, hasher, is_stable
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        """Write everything; a short write of the operating system is continued."""
        view = memoryview(data).cast("B")
        # Other memory is the caller's again once this returns.
        kept = view if view.nbytes >= _LARGE and self._is_stable(view) else bytes(view)
        self._hasher.submit(self.digest.update, kept)
        rest = view
        while rest.nbytes:
            rest = rest[self._raw.write(rest) :]
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
