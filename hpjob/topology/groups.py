"""Groups of GPUs of a node in which every pair is linked: where tensor parallelism may go."""

from __future__ import annotations

from itertools import combinations

from hpjob.topology.model import Node


def all_to_all_groups(node: Node, size: int) -> list[tuple[int, ...]] | None:
    """Split a node's GPUs into groups of ``size`` whose pairs are all linked.

    Returns:
        The groups in the order of their first GPU, or None when there is no such split.
    """
    gpus = [gpu.index for gpu in node.gpus]
    if size < 1 or len(gpus) % size:
        return None
    return _split(gpus, size, _linked_pairs(node))


def largest_group_size(node: Node) -> int:
    """Return the largest group size that splits the node's GPUs into all-to-all groups."""
    count = len(node.gpus)
    sizes = [size for size in range(count, 0, -1) if count % size == 0]
    return next((size for size in sizes if all_to_all_groups(node, size) is not None), 1)


def _linked_pairs(node: Node) -> set[tuple[int, int]]:
    pairs: set[tuple[int, int]] = set()
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


def _split(gpus: list[int], size: int, pairs: set[tuple[int, int]]) -> list[tuple[int, ...]] | None:
    """Backtrack over the groups that the first free GPU can form."""
    if not gpus:
        return []
    first, rest = gpus[0], gpus[1:]
    friends = [gpu for gpu in rest if (min(first, gpu), max(first, gpu)) in pairs]
    for others in combinations(friends, size - 1):
        if any(pair not in pairs for pair in combinations(sorted(others), 2)):
            continue
        left = _split([gpu for gpu in rest if gpu not in others], size, pairs)
        if left is not None:
            return [(first, *others), *left]
    return None
