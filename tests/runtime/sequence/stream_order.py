"""Finds what streams may do in the wrong order, from the order in which operations were queued.

On CPUs each operation is done before the next one is queued. Here each is noted with the stream that a GPU would run it
on and the bytes that it reads or writes, its own and its neighbour's. What the notes of all ranks leave unordered,
although both touch the same bytes and one writes, may happen in either order on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.runtime.file_memory import FileMemory

CURRENT, SIDE = 0, 1


@dataclass(frozen=True)
class Access:
    """Bytes that an operation of a stream reads or writes; a place is a rank's memory."""

    stream: int
    place: tuple[int, int]
    begin: int
    end: int
    writes: bool
    name: str

    def conflicts(self, other: Access) -> bool:
        return (
            self.place == other.place
            and (self.writes or other.writes)
            and self.begin < other.end
            and other.begin < self.end
        )


@dataclass
class Notes:
    """What one rank queued, in that order: accesses, and ("follow" | "mark" | "join" | "meet", number)."""

    rank: int
    entries: list[Any] = field(default_factory=list)
    memories: list[FileMemory] = field(default_factory=list)
    stream: int = CURRENT
    pauses: bool = False
    marks: int = 0

    def access(self, tensor: torch.Tensor, writes: bool, name: str) -> None:
        if self.pauses or not tensor.numel():
            return
        begin = tensor.data_ptr()
        end = begin + tensor.element_size() * (
            1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        )
        place, start = (-1, self.rank), 0
        for number, memory in enumerate(self.memories):
            for owner, whole in enumerate(memory.whole):
                if whole.data_ptr() <= begin < whole.data_ptr() + whole.nbytes:
                    place, start = (number, owner), whole.data_ptr()
        self.entries.append(Access(self.stream, place, begin - start, end - start, writes, name))


class NotedOperations(TorchDispatchMode):
    """Notes every operation; a result is something written, maybe where something else has been."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self._notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        name = str(func)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    self._notes.access(tensor, writes, name)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._notes.access(tensor, True, name)
        return result


class NotedSide:
    """In the place of a side stream."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    @contextmanager
    def following(self) -> Iterator[None]:
        self._notes.entries.append(("follow", 0))
        self._notes.stream = SIDE
        yield
        self._notes.stream = CURRENT

    def mark(self) -> int:
        self._notes.marks += 1
        self._notes.entries.append(("mark", self._notes.marks))
        return self._notes.marks

    def join(self, event: int) -> None:
        self._notes.entries.append(("join", event))


class NotedMemory(FileMemory):
    """Notes meetings, of which one in two may be left out.

    Args:
        notes: Of this rank.
        left_out: 0 for the one before the copies, 1 for the one after them, None for neither.
    """

    def __init__(
        self, group: dist.ProcessGroup, folder: str, notes: Notes, left_out: int | None, num_bytes: int
    ) -> None:
        notes.pauses = True
        super().__init__(group, folder, num_bytes)
        notes.pauses = False
        notes.memories.append(self)
        self._notes = notes
        self._left_out = left_out
        self._meetings = 0

    def meet(self) -> None:
        self._meetings += 1
        self._notes.pauses = True
        super().meet()
        self._notes.pauses = False
        if (self._meetings - 1) % 2 != self._left_out:
            self._notes.entries.append(("meet", 0))


@dataclass(frozen=True)
class _Dated:
    access: Access
    line: int
    time: int
    clock: tuple[int, ...]

    def is_before(self, other: _Dated) -> bool:
        return other.clock[self.line] >= self.time


def unordered(entries_of_ranks: Sequence[Sequence[Any]]) -> list[tuple[Access, Access]]:
    """Pairs of accesses of different streams that conflict and that nothing orders: vector clocks over all streams."""
    world = len(entries_of_ranks)
    clocks = [[0] * 2 * world for _ in range(2 * world)]
    marks: dict[tuple[int, int], list[int]] = {}
    dated: list[_Dated] = []
    rests = [iter(entries) for entries in entries_of_ranks]
    while True:
        at_meeting = [_advance(rank, rest, clocks, marks, dated) for rank, rest in enumerate(rests)]
        if not any(at_meeting):
            break
        assert all(at_meeting), "all ranks meet as often"
        together = [max(times) for times in zip(*(clocks[2 * rank + SIDE] for rank in range(world)), strict=True)]
        for rank in range(world):
            clocks[2 * rank + SIDE] = list(together)
    by_place: dict[tuple[int, int], list[_Dated]] = {}
    for each in dated:
        by_place.setdefault(each.access.place, []).append(each)
    return [
        (one.access, other.access)
        for one in dated
        if one.access.stream == SIDE
        for other in by_place[one.access.place]
        if other.line != one.line
        and one.access.conflicts(other.access)
        and not (one.is_before(other) or other.is_before(one))
    ]


def _advance(
    rank: int,
    rest: Iterator[Any],
    clocks: list[list[int]],
    marks: dict[tuple[int, int], list[int]],
    dated: list[_Dated],
) -> bool:
    """Go on to this rank's next meeting; whether there is one."""
    current, side = 2 * rank + CURRENT, 2 * rank + SIDE

    def wait(line: int, clock: Sequence[int]) -> None:
        clocks[line] = [max(times) for times in zip(clocks[line], clock, strict=True)]

    for entry in rest:
        if isinstance(entry, Access):
            line = 2 * rank + entry.stream
            clocks[line][line] += 1
            dated.append(_Dated(entry, line, clocks[line][line], tuple(clocks[line])))
            continue
        kind, number = entry
        if kind == "meet":
            return True
        if kind == "follow":
            wait(side, clocks[current])
        elif kind == "mark":
            marks[rank, number] = list(clocks[side])
        else:
            wait(current, marks[rank, number])
    return False
