"""Copies of this rank's shards in host memory, so that training may change the originals while they are written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

_CGROUPS = Path("/sys/fs/cgroup")
_RESERVE = 0.1
"""Share of the free memory that staging leaves alone."""


class Staging:
    """Buffers that are made with the first copy and used again by every later one.

    Pinned where there are GPUs, so that the copy runs at the speed of the bus.
    """

    def __init__(self) -> None:
        self._buffers: dict[MetadataIndex, torch.Tensor] = {}

    @property
    def size_bytes(self) -> int:
        """Memory held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def copy(self, tensors: Mapping[MetadataIndex, torch.Tensor]) -> dict[MetadataIndex, torch.Tensor]:
        """Copy tensors; the result is valid until the next copy.

        Raises:
            RuntimeError: No memory for the buffers.
        """
        if not self._buffers:
            self._buffers = {index: _buffer_for(tensor) for index, tensor in tensors.items()}
        for index, tensor in tensors.items():
            self._buffers[index].copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return dict(self._buffers)


def _buffer_for(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def staging_bytes(tensors: Mapping[MetadataIndex, torch.Tensor]) -> int:
    """Return the host memory that copies of the tensors take; torch rounds pinned ones up to a power of two."""
    return sum(1 << (t.nbytes - 1).bit_length() if t.is_cuda and t.nbytes else t.nbytes for t in tensors.values())


def missing_bytes(needed: int, ranks_on_node: int) -> int:
    """Return by how much the host memory of this node falls short if each of its ranks stages as much."""
    free = int(free_host_bytes() * (1 - _RESERVE))
    return max(0, needed * ranks_on_node - free)


def free_host_bytes() -> int:
    """Return the free memory of this host, or of this job's share of it where that is less."""
    free = int(psutil.virtual_memory().available)
    return min([free, *(left for group in _own_cgroups() if (left := _left_in(group)) is not None)])


def _own_cgroups() -> list[Path]:
    """Return the control groups (version 2) that this process is in, innermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    name = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if name is None:
        return []
    path = _CGROUPS / name
    return [path, *(parent for parent in path.parents if parent.is_relative_to(_CGROUPS))]


def _left_in(group: Path) -> int | None:
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):  # no such controller, or "max"
        return None
    # Cached files count as used, but make way for memory.
    cached = sum(int(line.split()[1]) for line in lines if line.startswith(("active_file ", "inactive_file ")))
    return max(0, limit - used + cached)
