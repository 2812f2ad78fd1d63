"""Collectives over many tensors at once, asynchronous: one launch, no flat copy.

They are methods of process groups. NCCL runs all tensors of a call in one kernel and gathers in place, as long as a
part lies where the collective would put it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor


class Work(Protocol):
    """A collective on its way."""

    def wait(self) -> Any:
        """Let what comes after, on the current stream or on the CPU, find the result."""


def start_reduce_scatter(parts: Sequence[Tensor], wholes: Sequence[Tensor], group: dist.ProcessGroup) -> Work:
    """Begin to sum tensors over a group, each rank its own part.

    Args:
        parts: Get this rank's chunk of each whole along dim 0.
        wholes: Contiguous; both must stay as they are until then.
        group: To sum over.
    """
    return _begin(group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")(
        list(parts), list(wholes)
    )


def start_all_gather(wholes: Sequence[Tensor], parts: Sequence[Tensor], group: dist.ProcessGroup) -> Work:
    """Begin to fill tensors with the parts of all ranks.

    Args:
        wholes: Contiguous.
        parts: This rank's chunk of each along dim 0, a view of it.
        group: Whose parts.
    """
    return _begin(group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")(list(wholes), list(parts))


def start_all_reduce(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Work:
    """Begin to sum contiguous tensors of one dtype over a group, in place."""
    work: Work = group.allreduce_coalesced(list(tensors))
    return work


def wait_for(works: list[Work]) -> None:
    """Wait for collectives, each once: the list is empty then."""
    for work in works:
        work.wait()
    works.clear()


def _begin(group: dist.ProcessGroup, new_name: str, name: str) -> Callable[[list[Tensor], list[Tensor]], Work]:
    """Newer torch has new names."""
    method: Callable[[list[Tensor], list[Tensor]], Work] = getattr(group, new_name, None) or getattr(group, name)
    return method
