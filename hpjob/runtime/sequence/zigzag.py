"""Zigzag order: which part of a causal sequence each rank of a ring holds.

The sequence is cut into ``2 * sp`` chunks. Rank r holds chunk r and chunk ``2 * sp - 1 - r``, one
early and one late, so that every rank has the same causal work at every step of the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpjob.core.errors import UserInputError


def padded_length(length: int, sp_size: int) -> int:
    """Smallest length >= ``length`` (tokens) that zigzag order can split over ``sp_size`` ranks."""
    unit = 2 * sp_size
    return -(-length // unit) * unit


def chunk_length(length: int, sp_size: int) -> int:
    """Tokens of one of the ``2 * sp_size`` chunks.

    Raises:
        UserInputError: ``length`` is no multiple of ``2 * sp_size``.
    """
    if length % (2 * sp_size):
        raise UserInputError(
            f"a sequence of {length} tokens cannot be split in zigzag order over {sp_size} ranks",
            hint=f"ring_attn needs a multiple of {2 * sp_size}: pad to {padded_length(length, sp_size)} "
            "with ignored labels, or change data.seq_length",
        )
    return length // (2 * sp_size)


def zigzag_chunks(rank: int, sp_size: int) -> tuple[int, int]:
    """Indices of the two chunks that ``rank`` holds, in the order in which it holds them."""
    return rank, 2 * sp_size - 1 - rank


def zigzag_split(tensor: Tensor, rank: int, sp_size: int, *, dim: int = 1) -> Tensor:
    """Part of a whole sequence that ``rank`` holds.

    Args:
        tensor: Any shape, with the whole sequence in natural order along ``dim``.
        rank: Rank inside the sequence-parallel group.
        sp_size: Size of that group.
        dim: Sequence dimension.

    Returns:
        A contiguous copy whose ``dim`` is ``1 / sp_size`` as long.

    Raises:
        UserInputError: The length is no multiple of ``2 * sp_size``.
    """
    chunk = chunk_length(tensor.shape[dim], sp_size)
    return torch.cat([tensor.narrow(dim, index * chunk, chunk) for index in zigzag_chunks(rank, sp_size)], dim=dim)


def zigzag_merge(parts: Sequence[Tensor], *, dim: int = 1) -> Tensor:
    """Whole sequence in natural order from the parts of all ranks, rank 0 first; undoes :func:`zigzag_split`."""
    sp_size = len(parts)
    chunks: list[Tensor] = [parts[0]] * (2 * sp_size)
    for rank, part in enumerate(parts):
        for index, piece in zip(zigzag_chunks(rank, sp_size), part.chunk(2, dim=dim), strict=True):
            chunks[index] = piece
    return torch.cat(chunks, dim=dim)


def zigzag_position_ids(length: int, rank: int, sp_size: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Positions, in a whole sequence of ``length`` tokens, of the tokens that ``rank`` holds.

    Returns:
        Shape (length / sp_size,), int64.

    Raises:
        UserInputError: ``length`` is no multiple of ``2 * sp_size``.
    """
    chunk = chunk_length(length, sp_size)
    return torch.cat(
        [
            torch.arange(index * chunk, (index + 1) * chunk, device=device, dtype=torch.int64)
            for index in zigzag_chunks(rank, sp_size)
        ]
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ZigzagBlock:
    """Which of a rank's queries meet which of a visiting rank's keys; local positions."""

    queries: slice
    keys: slice
    is_causal: bool


def zigzag_block(rank: int, source: int, length: int) -> ZigzagBlock:
    """Zigzag order leaves three cases: own keys, keys of a lower rank, keys of a higher rank.

    Args:
        rank: Whose queries.
        source: Whose keys.
        length: Tokens of one rank.
    """
    whole, half = slice(0, length), length // 2
    if source == rank:
        return ZigzagBlock(queries=whole, keys=whole, is_causal=True)
    if source < rank:
        return ZigzagBlock(queries=whole, keys=slice(0, half), is_causal=False)
    return ZigzagBlock(queries=slice(half, length), keys=whole, is_causal=False)


def zigzag_halves(length: int) -> tuple[slice, slice]:
    """The early and the late of a rank's two chunks; local positions."""
    return slice(0, length // 2), slice(length // 2, length)
