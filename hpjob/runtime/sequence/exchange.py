"""How the ranks of a split sequence exchange tokens at the edges of a tensor-parallel block, beside products.

All tokens lie in one row, (1, tokens, width), in which what one rank holds is contiguous.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from hpjob.runtime.parallel.peer_memory import PeerMemory, SideStream, allocator, reaches_peers
from hpjob.runtime.sequence.overlapped_products import (
    add_products,
    multiply_rows,
    multiply_while_gathering,
    multiply_while_scattering,
)
from hpjob.runtime.sequence.sequence_collectives import own_part, start_gather, unflatten

_numbers = count()
_exchanges: WeakValueDictionary[int, SequenceExchange] = WeakValueDictionary()


class PendingWhole(Protocol):
    """A whole sequence on its way."""

    def wait(self) -> Tensor:
        """Shape (1, whole sequence, features)."""


class SequenceExchange(ABC):
    """Exchanges parts of a sequence within a group.

    Attributes:
        group: Holds one part a rank.
        summands: What a sum over the group is left as.
        number: Names this exchange where only plain values may be passed on, see :func:`exchange_of`.
    """

    def __init__(self, group: dist.ProcessGroup, summands: int) -> None:
        self.group = group
        self.summands = summands
        self.number = next(_numbers)
        _exchanges[self.number] = self

    @abstractmethod
    def gather(self, shard: Tensor) -> PendingWhole:
        """Begin to gather (1, local sequence, features)."""

    @abstractmethod
    def multiply_while_gathering(self, shard: Tensor, factors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Gather and multiply.

        Args:
            shard: Shape (1, local sequence, features).
            factors: Each (features, outputs).

        Returns:
            The whole sequence, (1, whole sequence, features), and for each factor (1, whole sequence, outputs).
        """

    def products(self, shard: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:
        """Return the products of :meth:`multiply_while_gathering` alone."""
        return self.multiply_while_gathering(shard, factors)[1]

    @abstractmethod
    def multiply_while_scattering(self, tensors: Sequence[Tensor], factors: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Multiply, sum over pairs and ranks, and keep this rank's part.

        Args:
            tensors: Each (1, whole sequence, features).
            factors: For each of them (features, outputs).

        Returns:
            Waits for the result, whose sum over the first dim is the part, (summands, local sequence, outputs).
        """


def exchange_of(number: int) -> SequenceExchange:
    """Return the exchange of that number, which its user keeps alive."""
    return _exchanges[number]


class CollectiveExchange(SequenceExchange):
    """Through the collectives of the group, between any ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group, summands=1)

    def gather(self, shard: Tensor) -> PendingWhole:
        """See :class:`SequenceExchange`."""
        return start_gather(shard, self.group)

    def multiply_while_gathering(self, shard: Tensor, factors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """See :class:`SequenceExchange`."""
        return multiply_while_gathering(shard, factors, self.group)

    def multiply_while_scattering(self, tensors: Sequence[Tensor], factors: Sequence[Tensor]) -> Callable[[], Tensor]:
        """See :class:`SequenceExchange`."""
        return multiply_while_scattering(tensors, factors, self.group)


@dataclass(frozen=True, slots=True)
class _Copied:
    whole: Tensor
    side: SideStream

    def wait(self) -> Tensor:
        self.side.join()
        return self.whole


class PeerExchange(SequenceExchange):
    """Through memory of the ranks that all of them read: copies run beside products and take nothing from them.

    Two slots take turns. A rank writes to one, all meet, then the others read. Before they meet again each has waited
    for its own reads, so a slot is free when its turn comes.

    Args:
        group: Ranks that reach each other's memory.
        allocate: Makes memory of a size in bytes on all ranks; a collective call.
        device: This rank's.
    """

    def __init__(self, group: dist.ProcessGroup, allocate: Callable[[int], PeerMemory], device: torch.device) -> None:
        super().__init__(group, summands=group.size())
        self._allocate = allocate
        self._device = device
        self._side = SideStream(device)
        self._memory: PeerMemory | None = None
        self._slot_bytes = 0
        self._turn = 0

    def gather(self, shard: Tensor) -> PendingWhole:
        """See :class:`SequenceExchange`."""
        whole, _ = self._begin_gather(shard)
        with self._side.following():
            own_part(whole, self.group).copy_(shard)
        return _Copied(whole, self._side)

    def multiply_while_gathering(self, shard: Tensor, factors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """See :class:`SequenceExchange`."""
        whole, products = self._multiply(shard, factors)
        own_part(whole, self.group).copy_(shard)
        return whole, products

    def products(self, shard: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:
        """See :class:`SequenceExchange`."""
        return self._multiply(shard, factors)[1]

    def _multiply(self, shard: Tensor, factors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the whole sequence but for this rank's own part, and products."""
        whole, arrivals = self._begin_gather(shard)
        length, rank = shard.shape[1], self.group.rank()
        products = [shard.new_empty((1, whole.shape[1], factor.shape[1])) for factor in factors]
        multiply_rows(shard[0], factors, products, rank * length)
        for source, arrival in arrivals:
            self._side.join(arrival)
            rows = whole[0, source * length : (source + 1) * length]
            multiply_rows(rows, factors, products, source * length)
        self._side.join()
        return whole, products

    def multiply_while_scattering(self, tensors: Sequence[Tensor], factors: Sequence[Tensor]) -> Callable[[], Tensor]:
        """See :class:`SequenceExchange`."""
        size, rank = self.group.size(), self.group.rank()
        parts = [unflatten(tensor[0], 0, size) for tensor in tensors]
        shape = (parts[0].shape[1], factors[0].shape[1])
        result = tensors[0].new_empty((size, *shape))
        memory, begin = self._next_slot(result)
        num_bytes = result[0].nbytes
        for step in range(1, size):
            target, source = (rank + step) % size, (rank - step) % size
            out = memory.of(rank, shape, result.dtype, begin + target * num_bytes)
            add_products([part[target] for part in parts], factors, out)
            self._meet(memory)
            with self._side.following():
                result[source].copy_(memory.of(source, shape, result.dtype, begin + rank * num_bytes))
        add_products([part[rank] for part in parts], factors, result[rank])

        def wait() -> Tensor:
            self._side.join()
            return result

        return wait

    def _begin_gather(self, shard: Tensor) -> tuple[Tensor, list[tuple[int, torch.cuda.Event | None]]]:
        """Return the whole sequence without this rank's part, and from which ranks parts arrive after which events."""
        size, rank = self.group.size(), self.group.rank()
        memory, begin = self._next_slot(shard)
        rows = shard[0]
        memory.of(rank, rows.shape, rows.dtype, begin).copy_(rows)
        whole = rows.new_empty((size, *rows.shape))
        self._meet(memory)
        arrivals = []
        with self._side.following():
            for step in range(1, size):
                source = (rank - step) % size
                whole[source].copy_(memory.of(source, rows.shape, rows.dtype, begin))
                arrivals.append((source, self._side.mark()))
        return whole.flatten(0, 1).unsqueeze(0), arrivals

    def _meet(self, memory: PeerMemory) -> None:
        self._side.join()
        memory.meet()

    def _next_slot(self, like: Tensor) -> tuple[PeerMemory, int]:
        if self._memory is None or like.nbytes > self._slot_bytes:
            if self._device.type == "cuda":
                # Nobody may read any more what is given back here.
                torch.cuda.synchronize(self._device)
            self._slot_bytes = -(-like.nbytes // _ALIGNMENT) * _ALIGNMENT
            self._memory = self._allocate(2 * self._slot_bytes)
        self._turn = 1 - self._turn
        return self._memory, self._turn * self._slot_bytes


_ALIGNMENT = 4096


def sequence_exchange(group: dist.ProcessGroup, device: torch.device) -> SequenceExchange:
    """Return the fastest exchange between the ranks of a group; a collective call of them.

    Args:
        group: More than one rank.
        device: This rank's.
    """
    if not reaches_peers(group, device):
        return CollectiveExchange(group)
    return PeerExchange(group, allocator(group, device), device)
