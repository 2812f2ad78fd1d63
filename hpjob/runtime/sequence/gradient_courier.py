"""Brings what each rank adds to the gradient of circulating tensors home, and sums it on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hpjob.runtime.sequence.messages import Form, Message
from hpjob.runtime.sequence.ring import Ring
from hpjob.runtime.sequence.row_sums import RowSum, sum_dtype
from hpjob.runtime.sequence.zigzag import zigzag_block

Halves = tuple[Sequence[Tensor], Sequence[Tensor] | None]
"""For each circulating tensor what one rank adds to the early half of the rows, and to the late half: None = nothing.
Shape (batch, half the rows, heads, head_dim) each."""


class GradientCourier:
    """Gradients of tensors that :func:`circulate` brings past and whose rows lie in zigzag order.

    ``add`` is called once a step of :func:`circulate` on the same ring, except for the first one, at home: that part
    does not travel. The partial sum follows its tensor one step behind, so it travels while the next contribution is
    computed. Of each half of the rows travels only what got something yet: in the kernel's dtype as long as it is one
    contribution, which loses nothing, and in fp32 from the second one on. From the ranks that it passed a receiver
    knows what arrives.

    Args:
        ring: The ring.
        num_tensors: How many circulate together (K and V: 2).
    """

    def __init__(self, ring: Ring, num_tensors: int) -> None:
        self._ring = ring
        self._num_tensors = num_tensors
        self._parts: Sequence[Tensor] = ()
        self._inner: _Hop | None = None
        self._from_own_ring: _Hop | None = None
        self._outer: _Hop | None = None
        self._ending_round: int | None = None

    def add(self, contribution: Halves, outer_step: int, inner_step: int) -> None:
        """Add this rank's part for the present tensors; it is not to be changed afterwards."""
        self.advance()
        self._parts, late = contribution
        sums = self._sums(*self._parts, *([None] * self._num_tensors if late is None else late))
        ring = self._ring
        if ring.width > 1:
            if self._inner is not None:
                self._inner.arrive(sums)
            sender = ring.previous_inner
            source = ring.source(outer_step, inner_step, sender)
            arriving = self._forms(_passed_inside(ring, sender, source, outer_step, inner_step), source)
            self._inner = _Hop(ring, sums, arriving, partial(ring.send_inner, post=ring.sum_post, room=self._room()))
        if inner_step + 1 == ring.width:
            self._end_round(sums, outer_step)

    def _end_round(self, sums: list[RowSum], outer_step: int) -> None:
        if self._ring.width == 1:
            self._send_outer(sums, outer_step)
        elif outer_step == 0:
            self._from_own_ring, self._inner = self._inner, None
        else:
            self._ending_round = outer_step

    def advance(self) -> None:
        """Hand on to the next inner ring what has gone round this one, if anything: after some more computation."""
        if self._ending_round is not None and self._inner is not None:
            sums = self._sums(*[None] * 2 * self._num_tensors)
            self._inner.arrive(sums)
            self._inner = None
            self._send_outer(sums, self._ending_round)
            self._ending_round = None

    def _send_outer(self, sums: list[RowSum], outer_step: int) -> None:
        if self._outer is not None:
            self._outer.arrive(sums)
        ring = self._ring
        sender = ring.previous_outer
        source = ring.source(outer_step, 0, sender)
        arriving = self._forms(_passed_outside(ring, sender, outer_step), source)
        self._outer = _Hop(ring, sums, arriving, ring.send_outer)

    def collect(self) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """What the other ranks added to this rank's own tensors, after the last step: early and late half.

        The tensors are buffers of the ring, to be given back, or lie in a post, to be read before anything is sent.
        """
        self.advance()
        sums = self._sums(*[None] * 2 * self._num_tensors)
        for hop in (self._from_own_ring, self._outer):
            if hop is not None:
                hop.arrive(sums)
        values = [total.value for total in sums]
        return values[: self._num_tensors], values[self._num_tensors :]

    def _sums(self, *parts: Tensor | None) -> list[RowSum]:
        return [RowSum(self._ring.buffers, part) for part in parts]

    def _forms(self, passed: Sequence[int], source: int) -> list[Form | None]:
        """What a partial sum for ``source`` consists of after these ranks."""
        late = sum(zigzag_block(rank, source, 2).keys.stop == 2 for rank in passed)
        return [_form(part, contributions) for contributions in (len(passed), late) for part in self._parts]

    def _room(self) -> list[Form]:
        """What no rank's message exceeds: both halves, in the dtype that they have at the end of their way."""
        dtype = _travelling_dtype(self._parts[0], self._ring.size - 1)
        forms: list[Form] = [(part.shape, dtype) for part in self._parts]
        return forms * 2


class _Hop:
    """Sums on their way to the next rank, while those of the previous rank arrive in the given forms."""

    def __init__(
        self, ring: Ring, sums: Sequence[RowSum], arriving: Sequence[Form | None], send: Callable[..., Message]
    ) -> None:
        self._buffers = ring.buffers
        self._arriving = arriving
        self._sent = [total.value for total in sums if total.value is not None]
        self._message = send(*self._sent, arriving=[form for form in arriving if form is not None])

    def arrive(self, sums: Sequence[RowSum]) -> None:
        """Wait for the message and add what arrived."""
        received = iter(self._message.wait())
        self._buffers.give_back(*self._sent)
        for total, form in zip(sums, self._arriving, strict=True):
            if form is not None:
                total.add(next(received))


def _form(part: Tensor, contributions: int) -> Form | None:
    return (part.shape, _travelling_dtype(part, contributions)) if contributions else None


def _travelling_dtype(part: Tensor, contributions: int) -> torch.dtype:
    return part.dtype if contributions == 1 else sum_dtype(part)


def _passed_inside(ring: Ring, sender: int, source: int, outer_step: int, inner_step: int) -> list[int]:
    """Ranks whose contributions are in what ``sender`` sends inside its inner ring."""
    start = sender // ring.width * ring.width
    first_step = 0 if outer_step else 1
    return [start + (source + step) % ring.width for step in range(first_step, inner_step + 1)]


def _passed_outside(ring: Ring, sender: int, outer_step: int) -> list[int]:
    """Ranks whose contributions are in what ``sender`` sends to the next inner ring."""
    node = sender // ring.width
    nodes = [(node - step) % ring.num_outer_steps for step in range(outer_step)]
    return [each * ring.width + local for each in nodes for local in range(ring.width)]
