"""All-gather and reduce-scatter along any dimension, begun and waited for apart, without gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from hpjob.core.errors import UserInputError


def _all_gather(*args: Any, **kwargs: Any) -> Any:
    """Newer torch warns at the older name."""
    return getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(*args, **kwargs)


def _reduce_scatter(*args: Any, **kwargs: Any) -> Any:
    return getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class PendingGather:
    """An all-gather on its way."""

    pieces: Tensor
    """Shape (group size, *shard shape)."""
    work: Any
    dim: int

    def wait(self) -> Tensor:
        """The shards of all ranks, concatenated along the dimension."""
        self.work.wait()
        return join_pieces(self.pieces, self.dim)


@dataclass(frozen=True, kw_only=True)
class PendingReduction:
    """A reduce-scatter on its way."""

    part: Tensor
    work: Any
    pieces: Tensor
    """What is summed, held until it has been read."""

    def wait(self) -> Tensor:
        """This rank's part of the sum over the group."""
        self.work.wait()
        return self.part


def wait_for(tensor: Tensor) -> Tensor:
    """Result of a functional collective, inside compiled code."""
    arrived: Tensor = functional.wait_tensor(tensor)  # type: ignore[no-untyped-call]
    return arrived


def unflatten(tensor: Tensor, dim: int, pieces: int) -> Tensor:
    """View ``dim``, not negative, as two: pieces and what each of them has."""
    return tensor.view(*tensor.shape[:dim], pieces, -1, *tensor.shape[dim + 1 :])


def join_pieces(pieces: Tensor, dim: int) -> Tensor:
    """Concatenate (pieces, *shape) along ``dim`` of the shape; no copy where the dims before it are of size 1."""
    return pieces.movedim(0, dim).flatten(dim, dim + 1)


def cut_pieces(tensor: Tensor, size: int, dim: int) -> Tensor:
    """Return (size, *shape of a piece), contiguous: the opposite of :func:`join_pieces`, with the same copies."""
    return unflatten(tensor, dim, size).movedim(dim, 0).contiguous()


def start_gather(shard: Tensor, group: dist.ProcessGroup, dim: int = 1) -> PendingGather:
    """Begin to gather equal shards along ``dim``."""
    pieces = shard.new_empty((dist.get_world_size(group), *shard.shape))
    work = _all_gather(pieces.view(-1), shard.contiguous().view(-1), group=group, async_op=True)
    return PendingGather(pieces=pieces, work=work, dim=dim)


def start_reduction(tensor: Tensor, group: dist.ProcessGroup, dim: int = 1) -> PendingReduction:
    """Begin to sum over the group and to keep one part along ``dim``.

    Raises:
        UserInputError: ``dim`` is no multiple of the group size.
    """
    size = dist.get_world_size(group)
    check_divisible(tensor.shape[dim], size)
    pieces = cut_pieces(tensor, size, dim)
    return start_reduction_of_pieces(pieces, torch.empty_like(pieces[0]), group)


def start_reduction_of_pieces(pieces: Tensor, part: Tensor, group: dist.ProcessGroup) -> PendingReduction:
    """Begin to sum (group size, *shape of a piece) over the group; a rank's own piece is written to ``part``."""
    work = _reduce_scatter(part.view(-1), pieces.view(-1), group=group, async_op=True)
    return PendingReduction(part=part, work=work, pieces=pieces)


def own_part(tensor: Tensor, group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    """View this rank's part along a dim that is a multiple of the group size."""
    length = tensor.shape[dim] // dist.get_world_size(group)
    return tensor.narrow(dim, dist.get_rank(group) * length, length)


def local_part(tensor: Tensor, group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    """This rank's part of a tensor that all ranks hold.

    Raises:
        UserInputError: ``dim`` is no multiple of the group size.
    """
    check_divisible(tensor.shape[dim], dist.get_world_size(group))
    return own_part(tensor, group, dim).contiguous()


def check_divisible(length: int, size: int) -> None:
    """Refuse a sequence that cannot be split evenly.

    Raises:
        UserInputError: ``length`` is no multiple of ``size``.
    """
    if length % size:
        raise UserInputError(
            f"a sequence of {length} tokens cannot be split over {size} ranks",
            hint=f"pad to {-(-length // size) * size} with ignored labels, or change data.seq_length",
        )
