"""Groups of GPUs of a node in which every pair is linked: where tensor parallelism may go."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from hpjob.topology.model import Gpu, Node

Pair = tuple[int, int]


def usable_gpus(node: Node) -> list[Gpu]:
    """Return the GPUs that can carry a rank: whole ones that drive no display."""
    return [gpu for gpu in node.gpus if not gpu.mig and not gpu.display]


def all_to_all_groups(node: Node, size: int) -> list[tuple[int, ...]] | None:
    """Split a node's usable GPUs into groups of ``size`` whose pairs are all linked.

    Returns:
        The groups in the order of their first GPU, or None when there is no such split.
    """
    gpus = [gpu.index for gpu in usable_gpus(node)]
    if size < 1 or len(gpus) % size:
        return None
    return disjoint_groups(gpus, size, len(gpus) // size, linked_pairs(node))


def largest_group_size(node: Node) -> int:
    """Return the largest group size that splits the node's usable GPUs into all-to-all groups."""
    count = len(usable_gpus(node))
    sizes = [size for size in range(count, 0, -1) if count % size == 0]
    return next((size for size in sizes if all_to_all_groups(node, size) is not None), 1)


def connected_size(node: Node) -> int:
    """Return how many usable GPUs the largest set has that links connect, directly or through one another."""
    left = {gpu.index for gpu in usable_gpus(node)}
    pairs = linked_pairs(node)
    largest = 0
    while left:
        found = [min(left)]
        left.discard(found[0])
        for gpu in found:
            near = sorted(other for other in left if (min(gpu, other), max(gpu, other)) in pairs)
            found += near
            left.difference_update(near)
        largest = max(largest, len(found))
    return largest


def linked_pairs(node: Node) -> set[Pair]:
    """Return the pairs of GPUs that reach each other over NVLink or XGMI, smaller index first."""
    pairs: set[Pair] = set()
    for island in node.islands or ():
        # Not seen whether all pairs are linked: the connected set is all that is known, and is trusted.
        sets = island.cliques if island.all_to_all is False else (island.gpus,)
        for members in sets:
            pairs.update(combinations(sorted(members), 2))
    for link in node.links or ():
        pair = (min(link.a, link.b), max(link.a, link.b))
        if link.linked is False:
            pairs.discard(pair)
    return pairs


def disjoint_groups(gpus: Sequence[int], size: int, count: int, pairs: set[Pair]) -> list[tuple[int, ...]] | None:
    """Find ``count`` groups of ``size`` GPUs, no GPU in two of them, every pair of a group linked.

    Earlier GPUs are preferred, in the order given; some may be left over.

    Returns:
        The groups in the order of their first GPU, or None when there are none.
    """
    if count == 0:
        return []
    spare = len(gpus) - size * count
    if spare < 0:
        return None
    first, rest = gpus[0], gpus[1:]
    friends = [gpu for gpu in rest if (min(first, gpu), max(first, gpu)) in pairs]
    for others in combinations(friends, size - 1):
        if any((min(a, b), max(a, b)) not in pairs for a, b in combinations(others, 2)):
            continue
        left = disjoint_groups([gpu for gpu in rest if gpu not in others], size, count - 1, pairs)
        if left is not None:
            return [(first, *others), *left]
    return disjoint_groups(rest, size, count, pairs) if spare else None
