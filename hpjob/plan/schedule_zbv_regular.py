"""The V-shaped zero-bubble schedule by rule, without a bubble in its middle where all operations take equally long.

From 2·pp - 1 microbatches on, its only bubble is the ramp: (pp - 1) / (6 m + pp - 1). Source: ZB-V of "Zero Bubble
Pipeline Parallelism", section 6 (arXiv 2401.10241).
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

Op = tuple[str, int, int]
"""Kind (``F`` forward, ``B`` input gradient, ``W`` weight gradient), stage, microbatch."""


@lru_cache(maxsize=64)
def regular_orders(pp: int, num_microbatches: int) -> tuple[tuple[Op, ...], ...]:
    """Return what each rank computes in which order, with at most 2·pp activations of a chunk on a rank.

    Fewer than 2·pp - 1 microbatches leave holes where the missing ones would be.

    Args:
        pp: Pipeline ranks.
        num_microbatches: Microbatches of one step.
    """
    full = max(num_microbatches, 2 * pp - 1)
    orders = (_Writer(rank, pp).write(full) for rank in range(pp))
    return tuple(tuple(op for op in order if op[2] < num_microbatches) for order in orders)


class _Writer:
    """Writes the operations of one rank, on its stage on the way down and that on the way up, microbatches in turn."""

    def __init__(self, rank: int, pp: int) -> None:
        self.rank, self.pp = rank, pp
        self.stages = {"down": rank, "up": 2 * pp - 1 - rank}
        self.done: Counter[str] = Counter()
        self.order: list[Op] = []

    def write(self, count: int) -> list[Op]:
        rank, pp = self.rank, self.pp
        # Until the first microbatch is back at this rank.
        self.repeat(2 * (pp - rank) - 1, "F down")
        self.repeat(rank, "F up", "F down")
        self.repeat(pp - rank, "F up", "B up", "W up")
        self.repeat(count - self.done["F down"], "F down", "B down", "W down", "F up", "B up", "W up")
        self.repeat(count - self.done["F up"], "B down", "W down", "F up", "B up", "W up")
        # Others wait for the input gradients that are left, nobody for the weight gradients.
        self.repeat(rank, "B down", "B up")
        self.repeat(pp - rank, "B down", "W down")
        self.repeat(count - self.done["W up"], "W up")
        self.repeat(count - self.done["W down"], "W down")
        return self.order

    def repeat(self, times: int, *operations: str) -> None:
        for operation in operations * times:
            kind, way = operation.split()
            self.order.append((kind, self.stages[way], self.done[operation]))
            self.done[operation] += 1
