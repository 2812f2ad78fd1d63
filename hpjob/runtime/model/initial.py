"""Initial weights that depend only on seed, parameter name and global shape.

A parameter is cut into blocks of rows; each block has its own generator, seeded from the name and
the block's number. A rank makes the blocks that its shard touches and no more, so every layout
starts from the same numbers and no rank ever holds a whole model. Numbers come from the CPU
generator on every device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 20


def initial_region(
    name: str,
    shape: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    *,
    seed: int,
    std: float,
    gain: float = 1.0,
) -> Tensor:
    """Return a rectangular part of a parameter's initial value, fp32 on the CPU.

    Args:
        name: Global parameter name, such as ``model.layers.0.mlp.up_proj.weight``. Vectors named
            ``*.weight`` are norm gains and start at ``gain``, ``*.bias`` at zero, matrices at a normal
            distribution.
        shape: Global shape.
        offsets: Where the part begins, per dim.
        sizes: Extent of the part, per dim.
        seed: Seed of the run.
        std: Standard deviation of matrices.
        gain: Of norms.
    """
    if len(shape) == 1 or name.endswith(".bias"):
        return torch.full(tuple(sizes), 0.0 if name.endswith(".bias") else gain)
    part = torch.empty(tuple(sizes))
    if part.numel() == 0:
        return part
    columns = tuple(slice(o, o + n) for o, n in zip(offsets[1:], sizes[1:], strict=True))
    rows_per_block = max(1, _BLOCK_ELEMENTS // prod(shape[1:]))
    first, last = offsets[0], offsets[0] + sizes[0]
    for block in range(first // rows_per_block, -(-last // rows_per_block)):
        begin, end = block * rows_per_block, min((block + 1) * rows_per_block, shape[0])
        values = torch.empty(end - begin, *shape[1:])
        values.normal_(0.0, std, generator=_generator(seed, name, block))
        low, high = max(begin, first), min(end, last)
        part[low - first : high - first] = values[(slice(low - begin, high - begin), *columns)]
    return part


def initial_weight(name: str, shape: Sequence[int], *, seed: int, std: float, gain: float = 1.0) -> Tensor:
    """Return a parameter's whole initial value; see :func:`initial_region`."""
    return initial_region(name, shape, [0] * len(shape), shape, seed=seed, std=std, gain=gain)


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}\0{name}\0{block}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
