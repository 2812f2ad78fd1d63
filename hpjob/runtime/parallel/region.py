"""Which rectangular part of a parameter a rank holds.

Chunks are those of ``torch.chunk``: ceil(n / parts) each, the last ones shorter or empty. Tensor
parallelism cuts first, data parallelism then cuts what is left.
"""

from __future__ import annotations

from dataclasses import dataclass


def chunk_bounds(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return begin and end of one chunk of ``length`` elements."""
    size = -(-length // parts)
    begin = min(index * size, length)
    return begin, min(begin + size, length)


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle inside a tensor of global shape ``shape``."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        return cls(shape, (0,) * len(shape), shape)

    def chunk(self, dim: int, parts: int, index: int) -> Region:
        """Return one chunk of this rectangle along ``dim``."""
        begin, end = chunk_bounds(self.sizes[dim], parts, index)
        offsets = list(self.offsets)
        sizes = list(self.sizes)
        offsets[dim] += begin
        sizes[dim] = end - begin
        return Region(self.shape, tuple(offsets), tuple(sizes))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))
