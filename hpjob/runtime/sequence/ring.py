"""The ring: who sends K and V to whom at which step, and messages that travel while we compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from hpjob.core.errors import UserInputError
from hpjob.runtime.sequence.message_buffers import MessageBuffers, unrecorded

_numbers = count()
_rings: WeakValueDictionary[int, Ring] = WeakValueDictionary()


@dataclass(frozen=True, kw_only=True)
class Ring:
    """A ring over the ranks of a process group, or a ring of rings.

    With ``inner_size`` w the group's ranks form rings of w consecutive ranks (the GPUs of one node): K and V go
    once around the inner ring for each step of the outer ring, so only one message in w crosses nodes, and it has
    the time of w steps to arrive.

    Attributes:
        group: The sequence-parallel process group.
        inner_size: Ranks of an inner ring; None for one plain ring.
        outer_group: Second process group over the same ranks for the messages between inner rings. NCCL runs the
            messages of one group one after the other; with a second group they pass each other.
        number: Names this ring where only plain values may be passed on, see :func:`ring_of`.
        buffers: Memory of its messages.
    """

    group: dist.ProcessGroup
    inner_size: int | None = None
    outer_group: dist.ProcessGroup | None = None
    number: int = field(init=False, compare=False, default_factory=lambda: next(_numbers))
    buffers: MessageBuffers = field(init=False, compare=False, repr=False, default_factory=MessageBuffers)

    def __post_init__(self) -> None:
        if self.inner_size is not None and (self.inner_size < 1 or self.size % self.inner_size):
            raise UserInputError(
                f"an inner ring of {self.inner_size} ranks does not divide sp_size {self.size}",
                hint="choose an inner ring size that divides sp_size, usually the number of its ranks on one node",
            )
        _rings[self.number] = self

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def width(self) -> int:
        """Ranks of an inner ring."""
        return self.inner_size or self.size

    @property
    def num_outer_steps(self) -> int:
        return self.size // self.width

    def source(self, outer_step: int, inner_step: int, rank: int | None = None) -> int:
        """Rank whose K and V this rank, or ``rank``, works on at a step."""
        node, local = divmod(self.rank if rank is None else rank, self.width)
        return (node - outer_step) % self.num_outer_steps * self.width + (local - inner_step) % self.width

    @property
    def previous_inner(self) -> int:
        """Rank that this rank receives from inside the inner ring."""
        node, local = divmod(self.rank, self.width)
        return node * self.width + (local - 1) % self.width

    @property
    def previous_outer(self) -> int:
        """Rank that this rank receives from between inner rings."""
        return (self.rank - self.width) % self.size

    def send_inner(self, *tensors: Tensor, arriving: Sequence[Form] | None = None) -> Message:
        """Start sending to the next rank of the inner ring and receiving from the previous one.

        Args:
            tensors: What is sent; kept and left unchanged until the message was waited for.
            arriving: Forms of what the previous rank sends; by default those of ``tensors``.
        """
        node, local = divmod(self.rank, self.width)
        following = node * self.width + (local + 1) % self.width
        return Message(self.buffers, tensors, arriving, self.group, following, self.previous_inner)

    def send_outer(self, *tensors: Tensor, arriving: Sequence[Form] | None = None) -> Message:
        """Start sending to the same place of the next inner ring and receiving from that of the previous one."""
        following = (self.rank + self.width) % self.size
        return Message(self.buffers, tensors, arriving, self.outer_group or self.group, following, self.previous_outer)


def ring_of(number: int) -> Ring:
    """Return the ring of that number, which its user keeps alive."""
    return _rings[number]


Form = tuple[Sequence[int], torch.dtype]
"""Shape and dtype of a tensor that arrives."""


class Message:
    """Tensors on their way to the next rank while others arrive from the previous rank.

    Args:
        buffers: Where arriving tensors are put; who waits for them gives them back.
        tensors: What is sent.
        arriving: Forms of what arrives; None = those of ``tensors``.
        group: Carries both.
        following: Rank in ``group`` that is sent to.
        previous: Rank in ``group`` that is received from.
    """

    def __init__(
        self,
        buffers: MessageBuffers,
        tensors: Sequence[Tensor],
        arriving: Sequence[Form] | None,
        group: dist.ProcessGroup,
        following: int,
        previous: int,
    ) -> None:
        self._sent = [tensor.contiguous() for tensor in tensors]
        device = tensors[0].device
        forms = [(tensor.shape, tensor.dtype) for tensor in tensors] if arriving is None else arriving
        self._received = tuple(buffers.take(shape, dtype, device) for shape, dtype in forms)
        to, of = dist.get_global_rank(group, following), dist.get_global_rank(group, previous)
        # Tags keep tensors of one shape apart where a backend does not promise their order.
        operations = [
            dist.P2POp(dist.isend, unrecorded(tensor), to, group, tag) for tag, tensor in enumerate(self._sent)
        ]
        operations += [
            dist.P2POp(dist.irecv, unrecorded(tensor), of, group, tag) for tag, tensor in enumerate(self._received)
        ]
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> tuple[Tensor, ...]:
        """What arrived. With NCCL only the current stream waits, not the host."""
        for work in self._works:
            work.wait()
        self._works, self._sent = [], []
        return self._received


def circulate(ring: Ring, *tensors: Tensor, is_kept: bool = False) -> Iterator[tuple[int, int, tuple[Tensor, ...]]]:
    """Bring the tensors of all ranks past this one; the next ones travel while the caller works on the present ones.

    Args:
        ring: The ring.
        tensors: This rank's.
        is_kept: The caller keeps what visits. Otherwise it is the caller's until the next step only: it lies in
            buffers that are used again, as do ``tensors`` if they are buffers of the ring.

    Yields:
        Outer step, inner step, and the tensors of rank ``ring.source(outer step, inner step)``.
    """
    current: tuple[Tensor, ...] = tensors
    for outer_step in range(ring.num_outer_steps):
        first = current
        next_outer = ring.send_outer(*current) if outer_step + 1 < ring.num_outer_steps else None
        for inner_step in range(ring.width):
            next_inner = ring.send_inner(*current) if inner_step + 1 < ring.width else None
            yield outer_step, inner_step, current
            arrived = current if next_inner is None else next_inner.wait()
            if current is not first and not is_kept:
                ring.buffers.give_back(*current)
            current = arrived
        if next_outer is not None:
            current = next_outer.wait()
        if not is_kept:
            # Only now: it was also sent to the next inner ring.
            ring.buffers.give_back(*first)
