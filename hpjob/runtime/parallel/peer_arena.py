"""Tensors in memory that the ranks of a group read directly, and their gathers and sums by copies.

The copy engines move the bytes, so a collective takes next to nothing from products that run beside it. Every rank
places the same tensors in the same order, so each lies at the same place everywhere.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from hpjob.runtime.optimizer.fused_update import rows
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

    def start_all_gather(self, wholes: Sequence[Tensor], chunks: Sequence[Tensor], *, has_news: bool) -> _Copied:
        """Begin to fill tensors with the chunks of all ranks.

        Before a chunk changes, all ranks must have waited for what they gathered and have met after that, as they do
        when they sum the gradient's norm.

        Args:
            wholes: Anywhere.
            chunks: This rank's of each, in the arena; may be the place in the whole itself.
            has_news: Chunks have changed since the last gather, on all ranks.
        """
        with self._side.following():
            if has_news:
                self._memory.meet()
            for whole, chunk in zip(wholes, chunks, strict=True):
                if chunk.data_ptr() != _chunk(whole, self._rank, self._size).data_ptr():
                    _chunk(whole, self._rank, self._size).copy_(chunk)
            for peer in self._peers():
                for whole, chunk in zip(wholes, chunks, strict=True):
                    is_inside = chunk.data_ptr() == _chunk(whole, self._rank, self._size).data_ptr()
                    place = _chunk(whole, peer, self._size) if is_inside else chunk
                    _chunk(whole, peer, self._size).copy_(self._like(place, peer))
            return _Copied(self._side, self._side.mark())

    def start_reduce_scatter(self, wholes: Sequence[Tensor], sums: Sequence[Tensor], *, is_first: bool) -> _Copied:
        """Begin to add all ranks' values of this rank's chunk.

        After waiting for it the wholes may be changed.

        Args:
            wholes: In the arena.
            sums: What each chunk is added to; may be the chunk's place in the whole itself.
            is_first: What is in ``sums`` does not count yet.
        """
        with self._side.following():
            self._memory.meet()
            staging = self._staging_for(wholes)
            for number, peer in enumerate(self._peers()):
                for whole, total in zip(wholes, sums, strict=True):
                    mine = _chunk(whole, self._rank, self._size)
                    arrived = staging[: mine.nbytes].view(mine.dtype).view(mine.shape)
                    arrived.copy_(self._like(mine, peer))
                    if number == 0 and total.data_ptr() != mine.data_ptr():
                        _add_two(total, mine, arrived, is_first=is_first)
                    else:
                        total.add_(arrived)
            self._memory.meet()
            return _Copied(self._side, self._side.mark())

    def _peers(self) -> list[int]:
        """The other ranks, so that at no time all read from one."""
        return [(self._rank + step) % self._size for step in range(1, self._size)]

    def _like(self, mine: Tensor, peer: int) -> Tensor:
        """What a peer has where this rank has a tensor of the arena."""
        return self._memory.of(peer, mine.shape, mine.dtype, mine.data_ptr() - self._base)

    def _staging_for(self, wholes: Sequence[Tensor]) -> Tensor:
        most = max(whole.nbytes // self._size for whole in wholes)
        if self._staging is None or self._staging.nbytes < most:
            self._staging = torch.empty(most, dtype=torch.uint8, device=wholes[0].device)
        return self._staging


def _add_two(total: Tensor, one: Tensor, two: Tensor, *, is_first: bool) -> None:
    if is_first:
        torch.add(one, two, out=total)
    elif total.is_cuda and importlib.util.find_spec("triton") is not None:
        _compiled_sum()(rows(total), rows(one), rows(two))
    else:
        total.add_(one).add_(two)


@cache
def _compiled_sum() -> Callable[[Tensor, Tensor, Tensor], None]:
    """One pass over memory in place of two."""

    def add(total: Tensor, one: Tensor, two: Tensor) -> None:
        total.add_(one).add_(two)

    compiled: Callable[[Tensor, Tensor, Tensor], None] = torch.compile(add, fullgraph=True)
    return compiled


def _chunk(whole: Tensor, index: int, parts: int) -> Tensor:
    length = whole.shape[0] // parts
    return whole.narrow(0, index * length, length)
