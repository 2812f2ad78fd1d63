"""Products at the edges of a split sequence whose communication runs while they are made.

Before a gather's rows of other ranks arrive, a rank multiplies its own; a sum over ranks is begun for one part of the
tokens while the next part is multiplied. That needs all tokens in one row, (1, tokens, width), where what one rank
holds is contiguous; any other batch is communicated and multiplied one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hpjob.runtime.sequence.sequence_collectives import (
    PendingReduction,
    check_divisible,
    start_gather,
    start_reduction,
    start_reduction_of_pieces,
    unflatten,
)

_MOST_PARTS = 4
_LEAST_ROWS = 2048
"""Of one rank in a part: fewer would make the products slower than what is hidden."""


def multiply_while_gathering(
    shard: Tensor, factors: Sequence[Tensor], group: dist.ProcessGroup, *, width: int | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Gather along the sequence and multiply.

    Args:
        shard: Shape (batch, local sequence, features).
        factors: Each (features, outputs).
        group: Holds one shard a rank.
        width: Only the first features are multiplied; None = all.

    Returns:
        What was gathered, (batch, whole sequence, features), and for each factor (batch, whole sequence, outputs).
    """
    pending = start_gather(shard, group)
    batch, length, _ = shard.shape
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if batch > 1 or size == 1:
        whole = pending.wait()
        return whole, [whole[..., :width] @ factor for factor in factors]
    products = [shard.new_empty((1, size * length, factor.shape[1])) for factor in factors]
    begin, end = rank * length, (rank + 1) * length
    multiply_rows(shard[0, :, :width], factors, products, begin)
    whole = pending.wait()
    rows = whole[0, :, :width]
    multiply_rows(rows[:begin], factors, products, 0)
    multiply_rows(rows[end:], factors, products, end)
    return whole, products


def multiply_rows(rows: Tensor, factors: Sequence[Tensor], products: Sequence[Tensor], begin: int) -> None:
    """Write the products of some rows of a sequence, (rows, features), to (1, whole sequence, outputs)."""
    for factor, product in zip(factors, products, strict=True):
        torch.mm(rows, factor, out=product[0, begin : begin + len(rows)])


def add_products(tensors: Sequence[Tensor], factors: Sequence[Tensor], out: Tensor) -> None:
    """Write the sum of products, of (rows, features) with (features, outputs), to (rows, outputs)."""
    torch.mm(tensors[0], factors[0], out=out)
    for tensor, factor in zip(tensors[1:], factors[1:], strict=True):
        out.addmm_(tensor, factor)


def multiply_while_scattering(
    tensors: Sequence[Tensor], factors: Sequence[Tensor], group: dist.ProcessGroup
) -> Callable[[], Tensor]:
    """Multiply, sum over pairs and ranks, and keep one part of the sequence.

    Args:
        tensors: Each (batch, whole sequence, features).
        factors: For each of them (features, outputs).
        group: To sum over.

    Returns:
        Waits for the result, (batch, local sequence, outputs).

    Raises:
        UserInputError: The sequence is no multiple of the group size.
    """
    first = tensors[0]
    size = dist.get_world_size(group)
    check_divisible(first.shape[1], size)
    length = first.shape[1] // size
    parts = min(_MOST_PARTS, length // _LEAST_ROWS)
    if len(first) > 1 or size == 1 or parts < 2:
        total = first.new_empty((*first.shape[:2], factors[0].shape[1]))
        add_products([tensor.flatten(0, 1) for tensor in tensors], factors, total.flatten(0, 1))
        return start_reduction(total, group).wait
    rows = [unflatten(tensor[0], 0, size) for tensor in tensors]
    result = first.new_empty((1, length, factors[0].shape[1]))
    pending: list[PendingReduction] = []
    begin = 0
    for target in result[0].tensor_split(parts):
        end = begin + len(target)
        pieces = first.new_empty((size, *target.shape))
        for rank, piece in enumerate(pieces):
            add_products([row[rank, begin:end] for row in rows], factors, piece)
        pending.append(start_reduction_of_pieces(pieces, target, group))
        begin = end

    def wait() -> Tensor:
        for reduction in pending:
            reduction.wait()
        return result

    return wait
