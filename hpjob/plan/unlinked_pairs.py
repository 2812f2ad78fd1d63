"""An order of the GPUs of a node in which two that lack a link are nowhere neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from hpjob.topology.groups import Pair

_MAX_TRIES = 20_000
"""GPUs tried at a place; nodes with that few links have no such order anyway."""


def keep_apart(gpus: Sequence[int], size: int, pairs: set[Pair]) -> tuple[int, ...] | None:
    """Order GPUs so that groups of neighbours, and neighbours of any axis, are linked.

    Axes have strides that divide the number of GPUs; the last of an axis is a neighbour of its first.

    Args:
        gpus: Earlier ones are preferred.
        size: GPUs of a group in which all pairs need a link.
        pairs: Linked ones, smaller index first.

    Returns:
        The order, the one given where all are linked; None when there is none.
    """
    count = len(gpus)
    if all(pair in pairs for pair in combinations(sorted(gpus), 2)):
        return tuple(gpus)
    strides = {stride for stride in range(1, count) if count % stride == 0}
    near = [
        [q for q in range(p) if p // size == q // size or p - q in strides or count - (p - q) in strides]
        for p in range(count)
    ]
    order: list[int] = []
    tries = 0

    def fill() -> bool:
        nonlocal tries
        if len(order) == count:
            return True
        for gpu in gpus:
            tries += 1
            if tries > _MAX_TRIES:
                return False
            if gpu in order:
                continue
            if all((min(gpu, order[q]), max(gpu, order[q])) in pairs for q in near[len(order)]):
                order.append(gpu)
                if fill():
                    return True
                order.pop()
        return False

    return tuple(order) if fill() else None
