"""Memory that ranks on CPUs share through files, in the place of memory of GPUs that read each other's."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


class HastyFileMemory(FileMemory):
    """Reads whatever is there: nobody waits for anybody."""

    def meet(self) -> None:
        return
