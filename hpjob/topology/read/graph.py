"""Components and cliques of small graphs of GPUs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import TypeVar

NodeT = TypeVar("NodeT", bound=Hashable)
Pair = tuple[int, int]

MAX_CLIQUE_SEARCH = 20
"""Members of a component up to which all maximal cliques are searched."""


def components(nodes: Iterable[NodeT], edges: Iterable[tuple[NodeT, NodeT]]) -> list[list[NodeT]]:
    """Connected components, each in the order of ``nodes``, single nodes included."""
    parent = {node: node for node in nodes}

    def root(node: NodeT) -> NodeT:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for a, b in edges:
        if a in parent and b in parent:
            parent[root(a)] = root(b)
    groups: dict[NodeT, list[NodeT]] = {}
    for node in parent:
        groups.setdefault(root(node), []).append(node)
    return list(groups.values())


def islands(gpus: Sequence[int], linked: set[Pair]) -> list[list[int]]:
    """Components of two or more GPUs; ``linked`` holds pairs with the smaller index first."""
    return sorted(sorted(group) for group in components(gpus, linked) if len(group) > 1)


def all_linked(group: Iterable[int], linked: set[Pair]) -> bool:
    """Whether every pair of the group is linked."""
    return all(pair in linked for pair in combinations(sorted(group), 2))


def maximal_cliques(group: Sequence[int], linked: set[Pair]) -> list[list[int]]:
    """Maximal all-to-all sets of two or more, largest first; bounded by :data:`MAX_CLIQUE_SEARCH`."""
    if all_linked(group, linked):
        return [sorted(group)] if len(group) > 1 else []
    if len(group) > MAX_CLIQUE_SEARCH:
        return []
    neighbours = {a: {b for b in group if (min(a, b), max(a, b)) in linked} for a in group}
    found: list[list[int]] = []

    def extend(chosen: list[int], candidates: set[int], excluded: set[int]) -> None:
        if not candidates and not excluded:
            if len(chosen) > 1:
                found.append(sorted(chosen))
            return
        pivot = max(candidates | excluded, key=lambda node: len(neighbours[node] & candidates))
        for node in sorted(candidates - neighbours[pivot]):
            extend([*chosen, node], candidates & neighbours[node], excluded & neighbours[node])
            candidates = candidates - {node}
            excluded = excluded | {node}

    extend([], set(group), set())
    return sorted(found, key=lambda clique: (-len(clique), clique))


def largest_cliques(group: Sequence[int], linked: set[Pair], whole: bool | None) -> tuple[tuple[int, ...], ...]:
    """The largest all-to-all sets of an island that is known not to be all-to-all; none for any other."""
    cliques = maximal_cliques(group, linked) if whole is False else []
    return tuple(tuple(clique) for clique in cliques if len(clique) == len(cliques[0]))


def disjoint_cliques(group: Sequence[int], linked: set[Pair]) -> list[list[int]]:
    """Cover a component with disjoint cliques, the largest first."""
    left = set(group)
    chosen: list[list[int]] = []
    while len(left) > 1:
        cliques = maximal_cliques(sorted(left), linked)
        if not cliques:
            break
        chosen.append(cliques[0])
        left -= set(cliques[0])
    return sorted(chosen)


def best_quads(group: Sequence[int], linked: set[Pair]) -> list[list[int]] | None:
    """Two disjoint groups of four with every pair linked, when eight GPUs can be split that way."""
    if len(group) != 8:
        return None
    first = group[0]
    for rest in combinations(group[1:], 3):
        quad = [first, *rest]
        other = [gpu for gpu in group if gpu not in quad]
        if all_linked(quad, linked) and all_linked(other, linked):
            return sorted([sorted(quad), sorted(other)])
    return None
