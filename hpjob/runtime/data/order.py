"""The order of samples: a seeded permutation of any size, computed value by value.

A table of a billion sample numbers would cost gigabytes on every rank, and numpy does not promise
the same shuffle in its next version. A Feistel network over the next even number of bits with
cycle walking needs no memory, is a bijection by construction, and is fixed by the code below.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_ROUNDS = 6


def shuffled(index: int, size: int, seed: int, epoch: int) -> int:
    """Return the element at ``index`` of the permutation of ``range(size)`` given by seed and epoch."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    key = _mix(_mix(seed & _MASK) ^ (epoch & _MASK))
    value = index
    while True:
        left, right = value >> half_bits, value & half_mask
        for round_index in range(_ROUNDS):
            left, right = right, left ^ (_mix(key ^ _mix((round_index << 48) ^ right)) & half_mask)
        value = (left << half_bits) | right
        # The network permutes a power of four >= size; walking on from outside leads back inside.
        if value < size:
            return value


def _mix(value: int) -> int:
    """SplitMix64's step: spreads every input bit over all 64 output bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
