"""The ring: who sends K and V to whom at which step, and messages that travel while we compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import Tensor

from hpjob.core.errors import UserInputError
from hpjob.runtime.sequence.message_buffers import MessageBuffers
from hpjob.runtime.sequence.messages import Form, GroupMessage, Message, forms_of
from hpjob.runtime.sequence.peer_post import PeerPost

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
        visitor_post: Carries what circulates round a plain ring in place of the group.
        sum_post: Carries sums round a plain ring in place of the group.
        number: Names this ring where only plain values may be passed on, see :func:`ring_of`.
        buffers: Memory of its messages.
    """

    group: dist.ProcessGroup
    inner_size: int | None = None
    outer_group: dist.ProcessGroup | None = None
    visitor_post: PeerPost | None = None
    sum_post: PeerPost | None = None
    number: int = field(init=False, compare=False, default_factory=lambda: next(_numbers))
    buffers: MessageBuffers = field(init=False, compare=False, repr=False, default_factory=MessageBuffers)

    def __post_init__(self) -> None:
        if self.inner_size is not None and (self.inner_size < 1 or self.size % self.inner_size):
            raise UserInputError(
                f"an inner ring of {self.inner_size} ranks does not divide sp_size {self.size}",
                hint="choose an inner ring size that divides sp_size, usually the number of its ranks on one node",
            )
        if self.num_outer_steps > 1 and (self.visitor_post or self.sum_post):
            raise ValueError("a post goes round one plain ring")
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

    def send_inner(
        self,
        *tensors: Tensor,
        arriving: Sequence[Form] | None = None,
        post: PeerPost | None = None,
        room: Sequence[Form] | None = None,
    ) -> Message:
        """Start sending to the next rank of the inner ring and receiving from the previous one.

        Args:
            tensors: What is sent; kept and left unchanged until the message was waited for.
            arriving: Forms of what the previous rank sends; by default those of ``tensors``.
            post: Carries the message; None = the group.
            room: Forms of the largest such message of any rank, for a post; by default those of ``tensors``.
        """
        forms = forms_of(tensors)
        expected = forms if arriving is None else arriving
        if post is not None:
            return post.send(tensors, expected, room or forms)
        node, local = divmod(self.rank, self.width)
        following = node * self.width + (local + 1) % self.width
        return GroupMessage(self.buffers, tensors, expected, self.group, following, self.previous_inner)

    def send_outer(self, *tensors: Tensor, arriving: Sequence[Form] | None = None) -> Message:
        """Start sending to the same place of the next inner ring and receiving from that of the previous one."""
        following = (self.rank + self.width) % self.size
        expected = forms_of(tensors) if arriving is None else arriving
        group = self.outer_group or self.group
        return GroupMessage(self.buffers, tensors, expected, group, following, self.previous_outer)


def ring_of(number: int) -> Ring:
    """Return the ring of that number, which its user keeps alive."""
    return _rings[number]


def circulate(ring: Ring, *tensors: Tensor, is_kept: bool = False) -> Iterator[tuple[int, int, tuple[Tensor, ...]]]:
    """Bring the tensors of all ranks past this one; the next ones travel while the caller works on the present ones.

    Args:
        ring: The ring.
        tensors: This rank's.
        is_kept: The caller keeps what visits. Otherwise it is the caller's until the next step only: it lies in
            memory that is used again, as do ``tensors`` if they are buffers of the ring.

    Yields:
        Outer step, inner step, and the tensors of rank ``ring.source(outer step, inner step)``.
    """
    post = None if is_kept else ring.visitor_post
    current: tuple[Tensor, ...] = tensors
    for outer_step in range(ring.num_outer_steps):
        first = current
        next_outer = ring.send_outer(*current) if outer_step + 1 < ring.num_outer_steps else None
        for inner_step in range(ring.width):
            next_inner = ring.send_inner(*current, post=post) if inner_step + 1 < ring.width else None
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
