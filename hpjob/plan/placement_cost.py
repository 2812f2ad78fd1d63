"""What a placement costs: traffic of each group that leaves an island, a node, a leaf switch, a spine.

Traffic is counted in links: a ring (tp, sp, dp) has one between neighbours in rank order, as NCCL builds it;
a pipeline one between neighbouring stages; experts (ep) exchange with every member of their group, each pair a
share of one link. A link that leaves a leaf also leaves the node and the island.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import fsum

from hpjob.plan.model import ParallelDegrees, RankPlace
from hpjob.plan.placement_distance import Level, NodeDistances
from hpjob.plan.placement_gpus import rails, signature
from hpjob.topology.groups import linked_pairs
from hpjob.topology.model import Node, Topology

Edge = tuple[int, int, float]
"""Two ranks and the share of a link between them."""


_COST = (0.0, 1.0, 9.0, 13.0, 17.0)
"""Relative cost of one link by level; leaving a node is the large step, from NVLink to a NIC."""
_OTHER_RAIL = 0.5
"""Extra cost between nodes when the two GPUs are on different rails: one more hop."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Weight of one link of each kind of group.

    The defaults are a ranking: what blocks every layer comes first, then pipeline messages, which wait for each
    other, then gradients, which hide behind compute. Give bytes a step to weigh pp against dp by volume.
    """

    tp: float = 1e6
    sp: float = 1e5
    ep: float = 1e5
    pp: float = 1e3
    dp: float = 1.0


@dataclass(slots=True)
class PlacementCost:
    """Links of each axis by the level they cross, and their weighted sum."""

    links: dict[str, list[float]] = field(default_factory=dict)
    """Axis -> links by :class:`Level`."""
    other_rail: float = 0.0
    """Links between nodes whose ends are known to be on different rails, of all axes."""
    total: float = 0.0

    def leaving(self, axis: str, level: Level) -> float:
        """Links of an axis that leave the things of a level, such as the node or the leaf."""
        return fsum(self.links.get(axis, [])[level:])

    def table(self) -> list[tuple[str, float, float, float, float]]:
        """Axis and its links that leave island, node, leaf, spine."""
        levels = (Level.ISLAND, Level.NODE, Level.LEAF, Level.SPINE)
        return [(axis, *(self.leaving(axis, level) for level in levels)) for axis in self.links]  # type: ignore[misc]


def placement_cost(
    degrees: ParallelDegrees, topology: Topology, places: Sequence[RankPlace], traffic: Traffic | None = None
) -> PlacementCost:
    """Count the traffic of a placement by level.

    Args:
        degrees: Sizes of the axes.
        topology: Its nodes are what ``places`` point into.
        places: One a rank, in rank order.
        traffic: Weights; None = the default ranking.
    """
    weights = traffic or Traffic()
    spots = [(place.node, place.gpu) for place in places]
    distances = NodeDistances(topology)
    inside = _Inside(topology.nodes)
    cost = PlacementCost()
    for axis, edges in axis_edges(degrees):
        counts = [0.0] * len(_COST)
        other_rail = 0.0
        for a, b, share in edges:
            (node_a, gpu_a), (node_b, gpu_b) = spots[a], spots[b]
            if node_a == node_b:
                counts[Level.NEAR if inside.linked(node_a, gpu_a, gpu_b) else Level.ISLAND] += share
            else:
                counts[distances.level(node_a, node_b)] += share
                if inside.any_rails and inside.rail(node_a, gpu_a) != inside.rail(node_b, gpu_b):
                    other_rail += share
        weight = getattr(weights, axis)
        cost.links[axis] = counts
        cost.other_rail += other_rail
        cost.total += weight * (fsum(n * c for n, c in zip(counts, _COST, strict=True)) + other_rail * _OTHER_RAIL)
    return cost


def node_link_cost(level: int) -> float:
    """Relative cost of one link that crosses a level."""
    return _COST[level]


def axis_edges(degrees: ParallelDegrees) -> Iterator[tuple[str, Iterator[Edge]]]:
    """Yield each axis that has groups, with its links between ranks."""
    d = degrees
    if d.tp > 1:
        yield "tp", _ring(d.world_size, 1, d.tp)
    if d.sp > 1:
        yield "sp", _ring(d.world_size, d.tp, d.sp)
    if d.ep > 1:
        yield "ep", _all_pairs(d.world_size, d.tp, d.ep)
    if d.pp > 1:
        stage = d.dp * d.sp * d.tp
        yield "pp", ((rank, rank + stage, 1.0) for rank in range(d.world_size - stage))
    if d.dp > 1:
        yield "dp", _ring(d.world_size, d.sp * d.tp, d.dp)


def _ring(world: int, stride: int, size: int) -> Iterator[Edge]:
    """Neighbours of every group of ranks ``r, r + stride, …``; two members have one link."""
    span = stride * size
    for start in range(0, world, span):
        for rank in range(start, start + span - stride):
            yield rank, rank + stride, 1.0
        if size > 2:
            for rank in range(start, start + stride):
                yield rank + span - stride, rank, 1.0


def _all_pairs(world: int, stride: int, size: int) -> Iterator[Edge]:
    span, share = stride * size, 1.0 / (size - 1)
    for start in range(0, world - span + 1, span):
        for first in range(start, start + stride):
            members = range(first, first + span, stride)
            for index, a in enumerate(members):
                for b in members[index + 1 :]:
                    yield a, b, share


class _Inside:
    """Links and rails inside nodes; looked up once for nodes that are alike."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        known: dict[object, tuple[set[tuple[int, int]] | None, dict[int, int]]] = {}
        self._of = []
        for node in nodes:
            key = signature(node)
            if key not in known:
                # Links that nobody saw are taken to be there: nothing tells one order from another.
                known[key] = (None if node.islands is None else linked_pairs(node), rails(node))
            self._of.append(known[key])
        self.any_rails = any(numbers for _, numbers in known.values())

    def linked(self, node: int, a: int, b: int) -> bool:
        pairs = self._of[node][0]
        return pairs is None or ((a, b) if a < b else (b, a)) in pairs

    def rail(self, node: int, gpu: int) -> int | None:
        return self._of[node][1].get(gpu)
