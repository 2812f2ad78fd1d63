"""The order of the nodes: several that suit the fabric are compared, and the cheapest is refined by swaps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import fsum

from hpjob.plan.model import ParallelDegrees
from hpjob.plan.placement_cost import Traffic, axis_edges, node_link_cost
from hpjob.plan.placement_distance import NodeDistances
from hpjob.topology.model import Topology

_SWAPS_TRIED = 60_000
"""Bound on the refinement, so that its time does not grow with the machine."""
_PARTNERS = 12
"""Positions that are tried for one costly link."""


def node_order(degrees: ParallelDegrees, topology: Topology, per_node: int, traffic: Traffic) -> list[int]:
    """Return indices of the nodes in rank order; never dearer than the order given or that of the names."""
    distances = NodeDistances(topology)
    given = list(range(len(topology.nodes)))
    if len(set(distances.unit)) == 1:
        return given
    links = _Links(degrees, per_node, len(given), traffic, distances)
    by_name = sorted(given, key=lambda index: topology.nodes[index].name)
    orders = [given, *_leaf_aware(degrees, per_node, distances), by_name]
    best = min(orders, key=links.cost)
    return _refined(best, links)


def node_links(degrees: ParallelDegrees, per_node: int, traffic: Traffic) -> dict[tuple[int, int], float]:
    """Return the weighted traffic between positions of nodes."""
    found: dict[tuple[int, int], float] = {}
    for axis, edges in axis_edges(degrees):
        weight = getattr(traffic, axis)
        own: dict[tuple[int, int], float] = {}
        for a, b, share in edges:
            p, q = a // per_node, b // per_node
            if p != q:
                pair = (p, q) if p < q else (q, p)
                own[pair] = own.get(pair, 0.0) + share
        for pair, links in own.items():
            found[pair] = found.get(pair, 0.0) + weight * links
    return found


class _Links:
    """Traffic between positions, and what it costs with given units at the positions."""

    def __init__(
        self, degrees: ParallelDegrees, per_node: int, count: int, traffic: Traffic, distances: NodeDistances
    ) -> None:
        self.distances = distances
        self._links = node_links(degrees, per_node, traffic)
        self.near: list[list[tuple[int, float]]] = [[] for _ in range(count)]
        """Position -> (other position, weight)."""
        for (p, q), weight in self._links.items():
            self.near[p].append((q, weight))
            self.near[q].append((p, weight))
        units = max(distances.unit) + 1
        self._price: list[dict[int, float]] = [{} for _ in range(units)]

    def price(self, a: int, b: int) -> float:
        """Cost of one link between two units."""
        row = self._price[a]
        found = row.get(b)
        if found is None:
            found = row[b] = node_link_cost(self.distances.unit_level(a, b))
        return found

    def cost(self, order: Sequence[int]) -> float:
        unit, price = self.distances.unit, self.price
        return fsum(weight * price(unit[order[p]], unit[order[q]]) for (p, q), weight in self._links.items())

    def at(self, position: int, unit: int, units: list[int], *, without: int = -1) -> float:
        """Cost of a position's links if it had this unit; the link to ``without`` is left out."""
        return fsum(weight * self.price(unit, units[q]) for q, weight in self.near[position] if q != without)


def _leaf_aware(degrees: ParallelDegrees, per_node: int, distances: NodeDistances) -> Iterator[list[int]]:
    """Orders that keep the groups of ranks inside units of nodes."""
    units = _units(distances)
    stage_ranks = degrees.dp * degrees.sp * degrees.tp
    widths = {degrees.tp, degrees.tp * degrees.sp, degrees.tp * degrees.ep, degrees.tp * degrees.sp * degrees.ep}
    chunks = sorted({1, *(width // per_node for width in widths if width > per_node)})
    for chunk in chunks:
        yield _whole_first(units, chunk)
    if degrees.pp == 1 or stage_ranks % per_node or stage_ranks == per_node:
        return
    stage_nodes = stage_ranks // per_node
    for chunk in chunks:
        if stage_nodes % chunk == 0:
            yield _columns(units, degrees.pp, stage_nodes, chunk)


def _units(distances: NodeDistances) -> list[list[int]]:
    """Nodes by unit, largest first; units under the same switches follow each other."""
    members: dict[int, list[int]] = {}
    for node, unit in enumerate(distances.unit):
        members.setdefault(unit, []).append(node)
    families: dict[tuple[str, ...], list[int]] = {}
    for unit in members:
        families.setdefault(distances.parents(unit), []).append(unit)
    size = {family: sum(len(members[unit]) for unit in units) for family, units in families.items()}
    # sorted() keeps the order of appearance among equals.
    ordered = sorted(families, key=lambda family: -size[family])
    return [members[unit] for family in ordered for unit in sorted(families[family], key=lambda u: -len(members[u]))]


def _whole_first(units: list[list[int]], chunk: int) -> list[int]:
    """Unit by unit in multiples of ``chunk`` nodes, then what is left, the largest remainders first."""
    whole = [node for unit in units for node in unit[: len(unit) // chunk * chunk]]
    rest = sorted((unit[len(unit) // chunk * chunk :] for unit in units), key=lambda nodes: -len(nodes))
    return whole + [node for nodes in rest for node in nodes]


def _columns(units: list[list[int]], pp: int, stage_nodes: int, chunk: int) -> list[int]:
    """Fill blocks of ``pp`` stages by ``chunk`` nodes, each from one unit where it can hold them."""
    nodes = _whole_first(units, pp * chunk)
    block = pp * chunk
    blocks = [nodes[start : start + block] for start in range(0, len(nodes), block)]
    return [node for stage in range(pp) for b in blocks for node in b[stage * chunk : (stage + 1) * chunk]][
        : pp * stage_nodes
    ]


def _refined(order: list[int], links: _Links) -> list[int]:
    """Swap nodes at the ends of costly links as long as that pays, within a bound."""
    order = list(order)
    units = [links.distances.unit[node] for node in order]
    holders: dict[int, list[int]] = {}
    tried, improved = 0, True
    while improved and tried < _SWAPS_TRIED:
        improved = False
        holders = _boundary(units, links)
        for position in range(len(order)):
            for wanted in _wanted(position, units, links):
                for other in holders.get(wanted, ())[:_PARTNERS]:
                    if units[other] != wanted or other == position:
                        continue
                    tried += 1
                    if _gain(position, other, units, links) > 1e-9:
                        order[position], order[other] = order[other], order[position]
                        units[position], units[other] = units[other], units[position]
                        improved = True
                        break
            if tried >= _SWAPS_TRIED:
                break
    return order


def _wanted(position: int, units: list[int], links: _Links) -> list[int]:
    """Units that a position would rather have: those at the far ends of its links, the heaviest first."""
    own = units[position]
    pull: dict[int, float] = {}
    for other, weight in links.near[position]:
        unit = units[other]
        if unit != own and links.price(own, unit) > links.price(unit, unit):
            pull[unit] = pull.get(unit, 0.0) + weight
    return sorted(pull, key=lambda unit: (-pull[unit], unit))[:3]


def _boundary(units: list[int], links: _Links) -> dict[int, list[int]]:
    """Unit -> its positions, those with costly links first: they lose least by a swap."""
    weight = [links.at(position, unit, units) for position, unit in enumerate(units)]
    found: dict[int, list[int]] = {}
    for position in sorted(range(len(units)), key=lambda p: (-weight[p], p)):
        found.setdefault(units[position], []).append(position)
    return found


def _gain(a: int, b: int, units: list[int], links: _Links) -> float:
    """What swapping two positions saves; the link between them costs the same before and after."""
    before = links.at(a, units[a], units, without=b) + links.at(b, units[b], units, without=a)
    after = links.at(a, units[b], units, without=b) + links.at(b, units[a], units, without=a)
    return before - after
