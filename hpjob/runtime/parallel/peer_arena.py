"""Tensors in memory that the ranks of a group read directly, and their gathers and sums by copies.

The copy engines move the bytes, so a collective takes next to nothing from products that run beside it. Every rank
places the same tensors in the same order, so each lies at the same place everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from hpjob.runtime.parallel.peer_memory import PeerMemory, SideStream

_ALIGNMENT = 256
"""Bytes, as torch's own allocator aligns for products and vector loads."""


def bytes_for(tensors: Sequence[tuple[Sequence[int], torch.dtype]]) -> int:
    """Return how many bytes an arena of tensors of these shapes has."""
    return sum(_aligned(prod(shape) * dtype.itemsize) for shape, dtype in tensors)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class _Copied:
    """Copies on their way."""

    side: SideStream
    event: torch.cuda.Event | None

    def wait(self) -> None:
        self.side.join(self.event)


class PeerArena:
    """Places tensors in peer memory, and exchanges those whose dim 0 is divided evenly over the ranks.

    An exchange has ended when all ranks have read what they need, so a tensor may be changed after waiting for it.

    Args:
        group: Ranks that reach each other's memory.
        num_bytes: See :func:`bytes_for`.
        allocate: Makes memory of a size in bytes on all ranks; a collective call.
        device: This rank's.
    """

    def __init__(
        self, group: dist.ProcessGroup, num_bytes: int, allocate: Callable[[int], PeerMemory], device: torch.device
    ) -> None:
        self._size, self._rank = group.size(), group.rank()
        self._memory = allocate(num_bytes)
        self._base = self._memory.of(self._rank, (1,), torch.uint8).data_ptr()
        self._num_bytes = num_bytes
        self._used = 0
        self._side = SideStream(device)
        self._staging: Tensor | None = None

    def place(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of the arena.

        Raises:
            ValueError: The arena is full.
        """
        begin = self._used
        self._used += _aligned(prod(shape) * dtype.itemsize)
        if self._used > self._num_bytes:
            raise ValueError(f"a tensor of shape {tuple(shape)} does not fit into what is left of the arena")
        # ``data``: autograd need not know that tensors have neighbours, which change on their own.
        return self._memory.of(self._rank, shape, dtype, begin).data

    def start_all_gather(self, wholes: Sequence[Tensor]) -> _Copied:
        """Begin to fill tensors of the arena with the chunks of the other ranks."""
        with self._side.following():
            self._memory.meet()
            for peer in self._peers():
                for whole in wholes:
                    _chunk(whole, peer, self._size).copy_(self._chunk_of(peer, whole, peer))
            return self._end()

    def start_reduce_scatter(self, wholes: Sequence[Tensor]) -> _Copied:
        """Begin to add to this rank's chunk of tensors of the arena those of the other ranks."""
        with self._side.following():
            self._memory.meet()
            staging = self._staging_for(wholes)
            for peer in self._peers():
                for whole in wholes:
                    mine = _chunk(whole, self._rank, self._size)
                    arrived = staging[: mine.nbytes].view(mine.dtype).view(mine.shape)
                    arrived.copy_(self._chunk_of(peer, whole, self._rank))
                    mine.add_(arrived)
            return self._end()

    def _end(self) -> _Copied:
        self._memory.meet()
        return _Copied(self._side, self._side.mark())

    def _peers(self) -> list[int]:
        """The other ranks, so that at no time all read from one."""
        return [(self._rank + step) % self._size for step in range(1, self._size)]

    def _chunk_of(self, peer: int, whole: Tensor, index: int) -> Tensor:
        mine = _chunk(whole, index, self._size)
        return self._memory.of(peer, mine.shape, mine.dtype, mine.data_ptr() - self._base)

    def _staging_for(self, wholes: Sequence[Tensor]) -> Tensor:
        most = max(whole.nbytes // self._size for whole in wholes)
        if self._staging is None or self._staging.nbytes < most:
            self._staging = torch.empty(most, dtype=torch.uint8, device=wholes[0].device)
        return self._staging


def _chunk(whole: Tensor, index: int, parts: int) -> Tensor:
    rows = whole.shape[0] // parts
    return whole.narrow(0, index * rows, rows)
