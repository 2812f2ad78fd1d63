"""Weights that are gathered and reduced together: those of a layer, or of an end of the model.

All ranks must begin the same collectives in the same order. What they are follows from the stage and from which weights
are trained, never from whether a gradient has reached a weight on this rank: one that did not is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hpjob.runtime.optimizer.master import MasterWeight
from hpjob.runtime.parallel.coalesced import Work, start_all_gather, start_all_reduce, start_reduce_scatter, wait_for
from hpjob.runtime.parallel.own_chunk import OwnChunk, SharingRanks
from hpjob.runtime.parallel.peer_arena import PeerArena


class SharedWeight(Protocol):
    """A weight that several ranks compute with."""

    @property
    def parameter(self) -> nn.Parameter: ...

    @property
    def chunk(self) -> OwnChunk | None: ...

    @property
    def master(self) -> MasterWeight | None: ...

    @property
    def whole(self) -> Tensor:
        """What is computed with, as a plain tensor."""

    def collect_gradient(self) -> None:
        """Add what the last backward pass left to the sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """How the ranks share the weights of a stage.

    Attributes:
        zero_stage: 0 to 3.
        num_microbatches: Of one step.
        defers: Weight gradients are computed after the backward passes, those of several microbatches in between.
    """

    zero_stage: int
    num_microbatches: int
    defers: bool = False

    @property
    def frees(self) -> bool:
        """Whether weights are whole only while they are used."""
        return self.zero_stage == 3

    @property
    def reduces_every(self) -> bool:
        """Whether gradients are reduced after every microbatch, so that there need not be whole ones of all layers."""
        return self.zero_stage >= 2 or (self.zero_stage == 1 and self.num_microbatches == 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    item: SharedWeight
    chunk: OwnChunk
    master: MasterWeight
    whole: Tensor
    """The weight's memory; autograd does not see what is written here."""

    @property
    def source(self) -> Tensor:
        """This rank's chunk as it is to be gathered."""
        return self.chunk.of(self.whole) if self.chunk.kept is None else self.chunk.kept

    def total(self) -> Tensor:
        """The whole sum of the gradients on this rank."""
        self.item.collect_gradient()
        master = self.master
        master.finish()
        if master.gradient is not None:
            return master.gradient.contiguous()
        if master.home is not None:
            return master.home.zero_()
        return torch.zeros(self.whole.shape, dtype=torch.float32, device=self.whole.device)


class WeightUnit:
    """Gathers the weights of one unit and reduces their gradients.

    Args:
        items: All weights of the unit.
        sharing: When they are gathered and reduced.
    """

    def __init__(self, items: Sequence[SharedWeight], sharing: Sharing) -> None:
        self._reduces_every = sharing.reduces_every
        self._frees = sharing.frees
        self._gathers: list[Work] = []
        self._reductions: list[Work] = []
        self._by_ranks: dict[SharingRanks, list[_Member]] = {}
        for item in items:
            if item.chunk is not None and item.master is not None:
                item.chunk.exchange = self._gathers
                member = _Member(item, item.chunk, item.master, item.whole.data)
                self._by_ranks.setdefault(item.chunk.ranks, []).append(member)
        self._is_on_gpu = bool(items) and items[0].whole.is_cuda
        self._items = items
        if not self._frees:
            self.gather_when_updated()
        self._is_whole = not self._frees
        self.in_backward = False
        """The backward pass needs the weights, so they are not freed."""
        self.is_reduced = False
        """The sums of this microbatch, or of this step, are reduced or on the way."""

    def gather_when_updated(self) -> None:
        """Begin to make the weights whole as soon as the last of them was updated."""
        if self._items and (chunk := self._items[-1].chunk) is not None:
            chunk.begin_exchange = self.gather

    def gather(self) -> None:
        """Begin to make weights whole that are not, or of which chunks have changed."""
        if self._frees and self._is_whole and not self._has_news():
            return
        for ranks, members in self._by_ranks.items():
            news = [member for member in members if member.chunk.is_news or self._frees]
            has_news = any(member.chunk.is_news for member in members)
            for member in news:
                member.chunk.is_news = False
                if self._frees:
                    resize(member.whole, is_whole=True)
            if news and ranks.shard.size() > 1:
                self._gathers += _gather(news, ranks, has_news=has_news)
            else:
                _copy_kept(news)
        self._is_whole = True
        if not self._is_on_gpu:
            # Nothing hides it there, and gloo wants its groups to live until a collective is done.
            wait_for(self._gathers)

    def _has_news(self) -> bool:
        return any(member.chunk.is_news for members in self._by_ranks.values() for member in members)

    def make_whole(self) -> None:
        """Wait until all weights are whole."""
        self.gather()
        wait_for(self._gathers)

    def free(self) -> None:
        """Give back the memory of weights that are whole only while they are used."""
        if not self._frees or not self._is_whole:
            return
        wait_for(self._gathers)
        for members in self._by_ranks.values():
            for member in members:
                resize(member.whole, is_whole=False)
        self._is_whole = False

    def reduce(self, beside: AbstractContextManager[Any], *, is_last: bool) -> None:
        """Begin to sum the gradients over all ranks, unless that was begun; of each, the chunk is left.

        Args:
            beside: Makes another stream the current one, for what waits for collectives.
            is_last: They are a step's last ones.
        """
        if self.is_reduced:
            return
        self.is_reduced = True
        wait_for(self._reductions)
        for ranks, members in self._by_ranks.items():
            trained = [member for member in members if member.item.parameter.requires_grad]
            if trained:
                self._reduce(trained, ranks, beside, is_last=is_last)

    def finish_reduction(self) -> None:
        """Wait for the sums."""
        wait_for(self._reductions)

    def _reduce(
        self, members: list[_Member], ranks: SharingRanks, beside: AbstractContextManager[Any], *, is_last: bool
    ) -> None:
        works: list[Work] = []
        if ranks.shard.size() > 1:
            for group, is_copied in _by_way(members, ranks):
                if is_copied and not self._reduces_every:
                    works.append(_start_in_place(group, ranks))
                else:
                    works += _start_adding(group, ranks, is_copied=is_copied)
        elif is_last:
            # Until then there is nothing to exchange, and the sums of the microbatches go on.
            for member in members:
                _leave(member, member.total())
        if ranks.replicate.size() > 1 and is_last:
            # What was read lives until the current stream has waited, too.
            held = list(works)
            with beside if works else nullcontext():
                wait_for(works)
                last = start_all_reduce([_reduced(member) for member in members], ranks.replicate)
            works.append(_Then(last, held.clear))
        self._reductions += works


def resize(whole: Tensor, *, is_whole: bool) -> None:
    """Give a weight memory, or take it away."""
    whole.untyped_storage().resize_(whole.numel() * whole.itemsize if is_whole else 0)


@dataclass(frozen=True, slots=True)
class _Then:
    """A collective and what is to be done with its result."""

    work: Work
    act: Callable[[], object]

    def wait(self) -> None:
        self.work.wait()
        self.act()


def _by_way(members: list[_Member], ranks: SharingRanks) -> list[tuple[list[_Member], bool]]:
    """Return those whose sums are exchanged by copies (True) and the others, where there are any."""
    copied = [m for m in members if ranks.arena is not None and m.chunk.is_even and m.master.home is not None]
    others = [m for m in members if m not in copied]
    return [(group, is_copied) for group, is_copied in ((copied, True), (others, False)) if group]


def _reduced(member: _Member) -> Tensor:
    if member.master.reduced is None:
        raise RuntimeError("a gradient was not reduced")
    return member.master.reduced


def _leave(member: _Member, total: Tensor) -> None:
    """Leave this rank's chunk of a sum as the reduced gradient."""
    member.master.reduced = member.chunk.of(total)
    member.master.gradient = None


def _start_in_place(members: list[_Member], ranks: SharingRanks) -> Work:
    """Begin to reduce sums where they have their home."""
    totals = [member.total() for member in members]
    for member, total in zip(members, totals, strict=True):
        _leave(member, total)
    return _arena(ranks).start_reduce_scatter(totals, [_reduced(member) for member in members], is_first=False)


def _arena(ranks: SharingRanks) -> PeerArena:
    if ranks.arena is None:
        raise RuntimeError("these ranks have no arena")
    return ranks.arena


def _start_adding(members: list[_Member], ranks: SharingRanks, *, is_copied: bool) -> list[Work]:
    """Begin to add whole sums to the reduced gradients; their memory is free when that is done."""
    totals = [member.total() for member in members]
    is_first = members[0].master.reduced is None
    for member, total in zip(members, totals, strict=True):
        member.master.gradient = None
        if is_first:
            member.master.reduced = torch.empty_like(member.chunk.of(total), memory_format=torch.contiguous_format)
    sums = [_reduced(member) for member in members]
    if is_copied:
        return [_arena(ranks).start_reduce_scatter(totals, sums, is_first=is_first)]
    return _collectives_adding(members, totals, sums, ranks, is_first=is_first)


def _collectives_adding(
    members: list[_Member], totals: list[Tensor], sums: list[Tensor], ranks: SharingRanks, *, is_first: bool
) -> list[Work]:
    even = [(total, out) for m, total, out in zip(members, totals, sums, strict=True) if m.chunk.is_even]
    uneven = [(m.chunk, total, out) for m, total, out in zip(members, totals, sums, strict=True) if not m.chunk.is_even]
    works: list[Work] = []
    if even:
        parts = [out if is_first else torch.empty_like(out) for _, out in even]

        def add() -> None:
            # Named here, so that they live until the collective is done.
            for part, (_, out) in zip(parts, even, strict=True):
                if part is not out:
                    out.add_(part)

        works.append(_Then(start_reduce_scatter(parts, [total for total, _ in even], ranks.shard), add))
    if uneven:

        def add_uneven() -> None:
            for chunk, total, out in uneven:
                mine = chunk.of(total)
                out.copy_(mine) if is_first else out.add_(mine)

        works.append(_Then(start_all_reduce([total for _, total, _ in uneven], ranks.shard), add_uneven))
    return works


def _gather(members: list[_Member], ranks: SharingRanks, *, has_news: bool) -> list[Work]:
    works: list[Work] = []
    even = [member for member in members if member.chunk.is_even]
    wholes, sources = [member.whole for member in even], [member.source for member in even]
    if even and ranks.arena is not None:
        works.append(ranks.arena.start_all_gather(wholes, sources, has_news=has_news))
    elif even:
        works.append(start_all_gather(wholes, sources, ranks.shard))
    uneven = [member for member in members if not member.chunk.is_even]
    _copy_kept(uneven)
    for member in uneven:
        member.chunk.clear_others(member.whole)
    if uneven:
        # Of each byte all ranks but one have zero, so the sum is that one's in any dtype.
        works.append(start_all_reduce([member.whole.view(torch.uint8) for member in uneven], ranks.shard))
    return works


def _copy_kept(members: list[_Member]) -> None:
    """Write this rank's chunk to its place in the weight, where it is kept elsewhere."""
    for member in members:
        if member.chunk.kept is not None:
            member.chunk.of(member.whole).copy_(member.chunk.kept)
