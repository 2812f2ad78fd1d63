"""Memory that ranks on CPUs share through files, in the place of memory of GPUs that read each other's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor


class FileMemory:
    """Peer memory of a group.

    Args:
        group: Gloo ranks of this host.
        folder: Where all of them have their files.
        num_bytes: Of each.
    """

    def __init__(self, group: dist.ProcessGroup, folder: str, num_bytes: int) -> None:
        self.group = group
        self.whole = [
            torch.from_file(f"{folder}/{num_bytes}-{rank}", shared=True, size=num_bytes, dtype=torch.uint8)
            for rank in range(group.size())
        ]

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype, begin: int = 0) -> Tensor:
        return self.whole[rank][begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)

    def meet(self) -> None:
        dist.barrier(group=self.group)


def file_allocator(folder: str) -> Callable[[dist.ProcessGroup, torch.device], Callable[[int], FileMemory]]:
    """In the place of :func:`hpjob.runtime.parallel.peer_memory.allocator`: files of their own for every call."""
    numbers = count()

    def allocate(group: dist.ProcessGroup, _: torch.device) -> Callable[[int], FileMemory]:
        home = Path(folder) / f"{dist.get_process_group_ranks(group)}-{next(numbers)}"
        home.mkdir(exist_ok=True)
        return partial(FileMemory, group, str(home))

    return allocate


class HastyFileMemory(FileMemory):
    """Reads whatever is there: nobody waits for anybody."""

    def meet(self) -> None:
        return
