"""Memory of every rank of a group that the other ranks read directly, over NVLink or the like.

A GPU's copy engines read it while all multiprocessors compute. A collective of NCCL occupies multiprocessors: products
that run beside it lose more than half of the time that it takes (``benchmarks/peer_copies.py``).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

log = logging.getLogger(__name__)

_held: WeakSet[SymmetricMemory] = WeakSet()

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class PeerMemory(Protocol):
    """The same number of bytes on every rank of a group."""

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype, begin: int = 0) -> Tensor:
        """View a part of a rank's memory.

        Args:
            rank: In the group.
            shape: Of the view.
            dtype: Of the view.
            begin: First byte; a multiple of the size of ``dtype``.
        """

    def meet(self) -> None:
        """Let the current stream wait until those of all ranks have come here: what they wrote before can be read."""


class SymmetricMemory:
    """Symmetric memory of torch; making it is a collective call of the group.

    Args:
        group: Ranks of one host.
        device: This rank's GPU.
        num_bytes: On each rank.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> None:
        # Held, because the handle does not.
        self._memory = _torch().empty_strided_p2p((num_bytes,), (1,), torch.uint8, device, group.group_name)
        self._handle = _torch().rendezvous(self._memory)
        self.num_bytes = num_bytes
        _held.add(self)

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype, begin: int = 0) -> Tensor:
        """See :class:`PeerMemory`."""
        view: Tensor = self._handle.get_buffer(rank, list(shape), dtype, begin // dtype.itemsize)
        return view

    def meet(self) -> None:
        """See :class:`PeerMemory`."""
        self._handle.barrier(channel=0)


def held_bytes() -> int:
    """Return how much memory of this rank its peers can read; torch's allocator does not count it."""
    return sum(memory.num_bytes for memory in _held)


def allocator(group: dist.ProcessGroup, device: torch.device) -> Callable[[int], PeerMemory]:
    """Return what makes memory of a size in bytes on all ranks of a group that :func:`reaches_peers`."""
    return partial(SymmetricMemory, group, device)


def _torch() -> Any:
    return symmetric._SymmetricMemory  # type: ignore[attr-defined]


def reaches_peers(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the ranks of a group can read each other's memory; a collective call of the group, equal on all ranks.

    ``HPJOB_PEER_COPIES=0`` in the environment of all ranks says no.

    Args:
        group: More than one rank.
        device: This rank's.
    """
    if device.type != "cuda" or "nccl" not in dist.get_backend(group) or os.environ.get("HPJOB_PEER_COPIES") == "0":
        return False
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, _host(), group=group)
    if len(set(hosts)) > 1:
        return False
    memory = _shared(group, device)
    if not all_agree(memory is not None, group, device):
        return False
    return all_agree(memory is not None and _reads(memory, group, device), group, device)


def all_agree(mine: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks of a group say so; a collective call."""
    answer = torch.tensor(mine, device=device, dtype=torch.int32)
    dist.all_reduce(answer, dist.ReduceOp.MIN, group=group)
    return bool(answer.item())


def _host() -> str:
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"


def _shared(group: dist.ProcessGroup, device: torch.device) -> SymmetricMemory | None:
    try:
        return SymmetricMemory(group, device, 4096)
    except (RuntimeError, ImportError, AttributeError, TypeError) as error:
        log.info("ranks of this host have no memory in common: %s", str(error).partition("\n")[0])
        return None


def _reads(memory: SymmetricMemory, group: dist.ProcessGroup, device: torch.device) -> bool:
    try:
        memory.meet()
        memory.of((group.rank() + 1) % group.size(), (1,), torch.uint8).clone()
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        log.info("ranks of this host cannot read each other's memory: %s", str(error).partition("\n")[0])
        return False
    return True


class SideStream:
    """A stream for copies beside the current one, of high priority: its small kernels must not wait for products.

    On a CPU everything runs at once.

    Args:
        device: Whose.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @contextmanager
    def following(self) -> Iterator[None]:
        """Make it the current stream, behind all that the current one has been given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """Return an event of all that it has been given so far."""
        return None if self._stream is None else self._stream.record_event()

    def join(self, event: torch.cuda.Event | None = None) -> None:
        """Let the current stream wait for an event, or for all that this one has been given."""
        if self._stream is None:
            return
        if event is None:
            torch.cuda.current_stream().wait_stream(self._stream)
        else:
            torch.cuda.current_stream().wait_event(event)
