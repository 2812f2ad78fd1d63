"""How far apart nodes are: NVLink domains, blocks, leaf switches and the switches above them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from hpjob.topology.model import Switch, Topology


class Level(IntEnum):
    """How far apart two GPUs are: the largest thing that traffic between them leaves."""

    NEAR = 0
    """Both in one island (or NVLink domain)."""
    ISLAND = 1
    """One node, no link: through the host."""
    NODE = 2
    """Two nodes under one leaf switch or in one block."""
    LEAF = 3
    """Two leaf switches under one switch above them."""
    SPINE = 4
    """Further apart, or not known to be linked."""


class NodeDistances:
    """Distances between the nodes of a topology, by their index.

    Nodes with the same leaf switches (a rail-optimised node has several), block and NVLink domain form a unit;
    nodes of a unit are interchangeable.
    """

    def __init__(self, topology: Topology) -> None:
        names = [node.name for node in topology.nodes]
        domain = _domains(topology)
        block = {name: block.name for block in topology.blocks or () for name in block.nodes}
        switches = topology.switches or ()
        leaves = _leaves(switches)
        self._heights = _heights(switches)
        self._above = _above_blocks(topology)
        self._has_aggregated = bool(topology.aggregated_blocks)
        self._nothing_known = not block and not leaves
        keys: dict[tuple[str | None, str | None, frozenset[str]], int] = {}
        self.unit: list[int] = []
        """Unit of each node, numbered by first appearance."""
        for name in names:
            key = (domain.get(name), block.get(name), frozenset(leaves.get(name, ())))
            self.unit.append(keys.setdefault(key, len(keys)))
        self._keys = list(keys)
        self._size = len(self._keys)
        self._known: dict[int, Level] = {}

    def level(self, a: int, b: int) -> Level:
        """Return the level of traffic between two different nodes."""
        return self.unit_level(self.unit[a], self.unit[b])

    def unit_level(self, a: int, b: int) -> Level:
        """Return the level of traffic between two nodes of these units."""
        if a > b:
            a, b = b, a
        key = a * self._size + b
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._level(a, b)
        return found

    def parents(self, unit: int) -> tuple[str, ...]:
        """Return what is right above a unit: switches over its leaves, or the smallest larger block.

        Units that share it are neighbours.
        """
        block = self._keys[unit][1]
        if block is not None and self._above.get(block):
            return (self._above[block][0],)
        above = {
            name for leaf in self._keys[unit][2] for name, hops in self._heights.get(leaf, {}).items() if hops == 1
        }
        return tuple(sorted(above))

    def _level(self, a: int, b: int) -> Level:
        (domain_a, block_a, leaves_a), (domain_b, block_b, leaves_b) = self._keys[a], self._keys[b]
        if domain_a is not None and domain_a == domain_b:
            return Level.NEAR
        if self._nothing_known or (block_a is not None and block_a == block_b) or leaves_a & leaves_b:
            return Level.NODE
        if block_a is not None and block_b is not None and not leaves_a and not leaves_b:
            near = set(self._above.get(block_a, ())[:1]) & set(self._above.get(block_b, ())[:1])
            return Level.LEAF if near or not self._has_aggregated else Level.SPINE
        hops = min((self._hops(x, y) for x in leaves_a for y in leaves_b), default=2)
        return Level.LEAF if hops == 1 else Level.SPINE

    def _hops(self, a: str, b: str) -> int:
        """Switches up from the further of two leaves to the nearest switch above both."""
        above_a, above_b = self._heights.get(a, {}), self._heights.get(b, {})
        return min((max(above_a[name], above_b[name]) for name in above_a.keys() & above_b.keys()), default=99)


def _domains(topology: Topology) -> dict[str, str]:
    """Node -> NVLink domain that reaches beyond it."""
    found = {name: domain.name for domain in topology.domains or () if len(domain.nodes) > 1 for name in domain.nodes}
    machine = topology.machine
    if not found and machine is not None and machine.island_size > machine.gpus_per_node:
        # The blocks of a machine whose NVLink spans nodes are its NVLink domains.
        found = {name: block.name for block in topology.blocks or () for name in block.nodes}
    return found


def _above_blocks(topology: Topology) -> dict[str, list[str]]:
    """Base block -> aggregated blocks that hold it, the smallest first."""
    found: dict[str, list[str]] = {}
    block_of = {name: block.name for block in topology.blocks or () for name in block.nodes}
    for above in sorted(topology.aggregated_blocks or (), key=lambda block: len(block.nodes)):
        for block in dict.fromkeys(block_of[name] for name in above.nodes if name in block_of):
            found.setdefault(block, []).append(above.name)
    return found


def _leaves(switches: Sequence[Switch]) -> dict[str, list[str]]:
    """Node -> switches that it hangs on: those of the lowest level that name it."""
    found: dict[str, list[str]] = {}
    lowest: dict[str, int] = {}
    for switch in switches:
        for name in switch.nodes:
            level = lowest.get(name)
            if level is None or switch.level < level:
                lowest[name], found[name] = switch.level, [switch.name]
            elif switch.level == level:
                found[name].append(switch.name)
    return found


def _heights(switches: Sequence[Switch]) -> dict[str, dict[str, int]]:
    """Leaf -> every switch above it with the number of hops; several roots and parents are allowed."""
    parents: dict[str, list[str]] = {}
    for switch in switches:
        for child in switch.switches:
            parents.setdefault(child, []).append(switch.name)
    found: dict[str, dict[str, int]] = {}
    for switch in switches:
        if not switch.nodes:
            continue
        above, edge, hops = {switch.name: 0}, [switch.name], 0
        while edge:
            hops += 1
            edge = list(dict.fromkeys(p for name in edge for p in parents.get(name, ()) if p not in above))
            above.update((name, hops) for name in edge)
        found[switch.name] = above
    return found
