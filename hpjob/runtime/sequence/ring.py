"""The ring: who sends K and V to whom at which step, and messages that travel while we compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from hpjob.core.errors import UserInputError

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
    """

    group: dist.ProcessGroup
    inner_size: int | None = None
    outer_group: dist.ProcessGroup | None = None
    number: int = field(init=False, compare=False, default_factory=lambda: next(_numbers))

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

    def source(self, outer_step: int, inner_step: int) -> int:
        """Rank whose K and V this rank works on at a step."""
        node, local = divmod(self.rank, self.width)
        return (node - outer_step) % self.num_outer_steps * self.width + (local - inner_step) % self.width

    def send_inner(self, tensor: Tensor) -> Message:
        """Start sending to the next rank of the inner ring and receiving the like from the previous one."""
        node, local = divmod(self.rank, self.width)
        start = node * self.width
        return Message(tensor, self.group, start + (local + 1) % self.width, start + (local - 1) % self.width)

    def send_outer(self, tensor: Tensor) -> Message:
        """Start sending to the same place of the next inner ring and receiving from that of the previous one."""
        following, previous = (self.rank + self.width) % self.size, (self.rank - self.width) % self.size
        return Message(tensor, self.outer_group or self.group, following, previous)


def ring_of(number: int) -> Ring:
    """Return the ring of that number, which its user keeps alive."""
    return _rings[number]


class Message:
    """A tensor on its way to the next rank while one of the same shape arrives from the previous rank."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup, following: int, previous: int) -> None:
        self._sent = tensor.contiguous()
        self._received = torch.empty_like(self._sent)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, dist.get_global_rank(group, following), group),
                dist.P2POp(dist.irecv, self._received, dist.get_global_rank(group, previous), group),
            ]
        )

    def wait(self) -> Tensor:
        """What arrived. With NCCL only the current stream waits, not the host."""
        for work in self._works:
            work.wait()
        return self._received


def circulate(ring: Ring, tensor: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Bring the tensors of all ranks past this one; the next one travels while the caller works on the present one.

    Yields:
        Outer step, inner step, and the tensor of rank ``ring.source(outer step, inner step)``.
    """
    current = tensor
    for outer_step in range(ring.num_outer_steps):
        next_outer = ring.send_outer(current) if outer_step + 1 < ring.num_outer_steps else None
        for inner_step in range(ring.width):
            next_inner = ring.send_inner(current) if inner_step + 1 < ring.width else None
            yield outer_step, inner_step, current
            if next_inner is not None:
                current = next_inner.wait()
        if next_outer is not None:
            current = next_outer.wait()


class GradientCourier:
    """Sums what each rank adds to the gradient of a circulating tensor and brings the sum home.

    ``add`` is called once a step of :func:`circulate` on the same ring; the partial sum follows its tensor one
    step behind, so it travels while the next contribution is computed. What arises at home does not travel.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._inner: Message | None = None
        self._outer: Message | None = None
        self._at_home: Tensor | None = None
        self._is_first_round = True

    def add(self, contribution: Tensor, inner_step: int) -> None:
        """Add this rank's part for the present tensor, in place of ``contribution``."""
        if self._at_home is None:
            self._at_home = contribution
        else:
            if self._inner is not None:
                contribution += self._inner.wait()
            self._inner = self._ring.send_inner(contribution) if self._ring.width > 1 else None
        if inner_step + 1 == self._ring.width:
            self._end_of_inner_ring(contribution)

    def _end_of_inner_ring(self, contribution: Tensor) -> None:
        total = contribution if self._inner is None else self._inner.wait()
        self._inner = None
        if self._is_first_round:
            self._is_first_round = False
            if self._at_home is not None and total is not self._at_home:
                self._at_home += total
            return
        if self._outer is not None:
            total += self._outer.wait()
        self._outer = self._ring.send_outer(total)

    def collect(self) -> Tensor:
        """Whole gradient of this rank's own tensor, after the last step."""
        if self._at_home is None or self._is_first_round:
            raise RuntimeError("a gradient was collected before the ring had gone round")
        return self._at_home if self._outer is None else self._at_home.add_(self._outer.wait())
