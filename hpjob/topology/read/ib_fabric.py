"""An InfiniBand fabric as records and cables, whichever tool printed it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from hpjob.topology.read.graph import components
from hpjob.topology.read.text import natural_key

_CARD_DEFAULT = re.compile(r"MT[0-9]{3,}\b|ConnectX|InfiniHost|QLogic Infiniband|BlueField", re.I)
_AGGREGATION = "Aggregation Node"
_RAIL_NAME = re.compile(r"leaf-r0*([0-9]+)-(su[0-9]+)")

NodeKey = tuple[str, str]
"""Node id, and what tells nodes apart whose ids were redacted."""
End = tuple[NodeKey, int]


@dataclass
class IbNode:
    """A switch or a channel adapter."""

    key: NodeKey
    is_switch: bool
    description: str | None = None
    has_record: bool = False

    @property
    def is_aggregation(self) -> bool:
        """A switch's SHARP aggregation node shows as an adapter and is no host."""
        return not self.is_switch and _AGGREGATION in (self.description or "")

    @property
    def is_hca(self) -> bool:
        """A channel adapter of a host: no switch, no router between subnets, no aggregation node."""
        return not (self.is_switch or self.is_aggregation or self.key[0].startswith("R-"))

    @property
    def words(self) -> list[str]:
        """Words of a description that a person or the host gave; empty for the card's default."""
        text = (self.description or "").strip()
        return [] if _CARD_DEFAULT.match(text) else text.split()

    @property
    def is_undescribed(self) -> bool:
        """The description is the card's default."""
        return bool(self.description is not None and _CARD_DEFAULT.match(self.description.strip()))

    @property
    def plain_name(self) -> str:
        """Name without the ``MF0;`` before it and the model behind it."""
        text = (self.description or "").strip() or self.key[0]
        text = text.split(";", 1)[1] if ";" in text else text
        return re.sub(r":[A-Z0-9-]+/\S*$", "", text).strip()


@dataclass
class Fabric:
    """Nodes and cables; each cable is held once however often it was printed.

    The properties are computed once, after :meth:`settle`.
    """

    nodes: dict[NodeKey, IbNode] = field(default_factory=dict)
    cables: set[frozenset[End]] = field(default_factory=set)
    disordered: bool = False
    """Lines stand in records to which they do not belong, so that only a confirmed cable counts."""
    contradicted: int = 0
    """Cables left out because a port that has another cable shows them."""
    rates: list[tuple[int, str]] = field(default_factory=list)
    """Width and speed of every port line that shows them."""

    def __post_init__(self) -> None:
        self.neighbours: dict[NodeKey, list[NodeKey]] = {}
        self._shown_by: dict[frozenset[End], NodeKey | None] = {}
        """Cable -> the one node whose record shows it; None = both ends show it, or a line is sure of it."""
        self._hcas_of: dict[NodeKey, list[NodeKey]] = {}

    def node(self, key: NodeKey, is_switch: bool, description: str | None) -> IbNode:
        """Return the node, made when it is new; the first description holds."""
        found = self.nodes.get(key)
        if found is None:
            found = self.nodes[key] = IbNode(key, is_switch, description)
        elif found.description is None:
            found.description = description
        return found

    def show(self, here: End, there: End, sure: bool) -> None:
        """Note that the record of ``here`` shows a cable to ``there``; :meth:`settle` decides.

        Args:
            here: End in whose record the line stands.
            there: The other end.
            sure: The line itself says that it belongs to this record.
        """
        if here[0] == there[0]:
            return
        cable = frozenset((here, there))
        if sure or self._shown_by.setdefault(cable, here[0]) != here[0]:
            self._shown_by[cable] = None

    def settle(self) -> None:
        """Take the cables that do not contradict each other.

        A port has one cable. Where a port shows two, and everywhere in a record that lists a port
        twice, a cable counts only when both ends show it, or a line that says where it belongs.
        """
        doubled, mixed_up = self._contradictions()
        for cable, shown_by in self._shown_by.items():
            if shown_by is not None and (self.disordered or shown_by in mixed_up or not doubled.isdisjoint(cable)):
                self.contradicted += 1
                continue
            self.cables.add(cable)
            (a, _), (b, _) = cable
            self.neighbours.setdefault(a, []).append(b)
            self.neighbours.setdefault(b, []).append(a)

    def _contradictions(self) -> tuple[set[End], set[NodeKey]]:
        """Ports with more than one cable, and nodes whose own record lists a port twice."""
        seen: set[End] = set()
        doubled: set[End] = set()
        for cable in self._shown_by:
            doubled |= seen & cable
            seen |= cable
        if not doubled:
            return doubled, set()
        shown: Counter[End] = Counter()
        for cable, shown_by in self._shown_by.items():
            shown.update(end for end in cable & doubled if shown_by is None or shown_by == end[0])
        return doubled, {end[0] for end, count in shown.items() if count > 1}

    @cached_property
    def switches(self) -> list[IbNode]:
        """Switches with a record of their own."""
        return [node for node in self.nodes.values() if node.is_switch and node.has_record]

    @cached_property
    def hcas(self) -> list[IbNode]:
        """Channel adapters of hosts, seen as records or at cables."""
        return [node for node in self.nodes.values() if node.is_hca]

    def hcas_of(self, switch: NodeKey) -> list[NodeKey]:
        """Adapters of hosts on one switch, each once."""
        if switch not in self._hcas_of:
            around = dict.fromkeys(self.neighbours.get(switch, []))
            found = [key for key in around if self.nodes[key].is_hca]
            self._hcas_of[switch] = found
        return self._hcas_of[switch]

    @cached_property
    def leaves(self) -> list[IbNode]:
        """Switches with a record that have a host's adapter."""
        return [switch for switch in self.switches if self.hcas_of(switch.key)]

    @cached_property
    def tiers(self) -> dict[NodeKey, int]:
        """Distance of every switch from the nearest leaf."""
        distance = {leaf.key: 0 for leaf in self.leaves}
        wave = list(distance)
        while wave:
            following: list[NodeKey] = []
            for key in wave:
                for other in self.neighbours.get(key, []):
                    if other not in distance and self.nodes[other].is_switch:
                        distance[other] = distance[key] + 1
                        following.append(other)
            wave = following
        return distance

    def leaf_groups(self) -> list[list[str]]:
        """Names of leaves that share a switch directly above, sorted."""
        distance = self.tiers
        leaves = {key for key, tier in distance.items() if tier == 0}
        edges: list[tuple[NodeKey, NodeKey]] = []
        for key, tier in distance.items():
            below = [other for other in self.neighbours.get(key, []) if other in leaves] if tier == 1 else []
            edges.extend((below[0], other) for other in below[1:])
        groups = [group for group in components(leaves, edges) if len(group) > 1]
        return sorted(sorted(self.nodes[key].plain_name for key in group) for group in groups)


@dataclass
class Hosts:
    """Hosts by the first word of their adapters' descriptions."""

    leaves_of: dict[str, dict[NodeKey, list[str]]] = field(default_factory=dict)
    """Host -> leaf -> devices (second words)."""
    names: dict[str, None] = field(default_factory=dict)
    units: list[set[NodeKey]] = field(default_factory=list)
    """Leaves joined by named hosts."""

    @cached_property
    def _unit_of_leaf(self) -> dict[NodeKey, set[NodeKey]]:
        return {leaf: unit for unit in self.units for leaf in unit}

    @cached_property
    def compute(self) -> list[str]:
        """Hosts with an adapter on every leaf of their unit."""
        return [host for host, leaves in self.leaves_of.items() if host != "localhost" and self._is_whole(leaves)]

    def _is_whole(self, leaves: dict[NodeKey, list[str]]) -> bool:
        unit = self._unit_of_leaf.get(next(iter(leaves), ("", "")), set())
        return leaves.keys() >= unit

    def partial(self) -> list[str]:
        """Hosts with adapters on fewer leaves, sorted."""
        whole = set(self.compute)
        return sorted(host for host in self.leaves_of if host not in whole and host != "localhost")


def find_hosts(fabric: Fabric) -> Hosts:
    """Group the adapters by host and the leaves by unit."""
    found = Hosts()
    for hca in fabric.hcas:
        words = hca.words
        if not words:
            continue
        found.names[words[0]] = None
        device = words[1] if len(words) > 1 else ""
        for other in dict.fromkeys(fabric.neighbours.get(hca.key, [])):
            if fabric.nodes[other].is_switch:
                found.leaves_of.setdefault(words[0], {}).setdefault(other, []).append(device)
    edges: list[tuple[NodeKey, NodeKey]] = []
    seen: dict[NodeKey, None] = {}
    for host, leaves in found.leaves_of.items():
        if host == "localhost":
            continue
        keys = list(leaves)
        seen.update(dict.fromkeys(keys))
        edges.extend((keys[0], other) for other in keys[1:])
    found.units = [set(group) for group in components(seen, edges)]
    return found


def rail_and_unit(leaf: IbNode) -> tuple[int, str] | None:
    """Rail and unit that a leaf's name gives."""
    match = _RAIL_NAME.fullmatch(leaf.plain_name)
    return (int(match[1]), match[2]) if match else None


def rails_of_leaves(fabric: Fabric, hosts: Hosts) -> dict[NodeKey, int]:
    """Rail of every leaf: from its name, else its place in its unit by the device that most hosts plug into it."""
    named = {leaf.key: found[0] for leaf in fabric.leaves if (found := rail_and_unit(leaf))}
    rails: dict[NodeKey, int] = dict(named)
    devices: dict[NodeKey, Counter[str]] = {}
    for leaves in hosts.leaves_of.values():
        for leaf, names in leaves.items():
            devices.setdefault(leaf, Counter()).update(names)
    for unit in hosts.units:
        if any(leaf in named for leaf in unit):
            continue
        usual = {leaf: devices[leaf].most_common(1)[0][0] for leaf in unit}
        if len(set(usual.values())) == len(usual):
            for rail, leaf in enumerate(sorted(unit, key=lambda key: natural_key(usual[key]))):
                rails[leaf] = rail
    return rails
