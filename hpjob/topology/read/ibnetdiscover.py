"""``ibnetdiscover``: switches, adapters, cables; leaves, rails and miscabled hosts.

Every cable is printed twice and counted once; SHARP aggregation nodes are no hosts; adapters that still
carry the card's default text stay in the count under their id.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache

from hpjob.topology.model import Nic, Node, Switch, Topology
from hpjob.topology.read.ib_fabric import Fabric, Hosts, NodeKey, find_hosts, rail_and_unit, rails_of_leaves
from hpjob.topology.read.ib_order import RecordOrder
from hpjob.topology.read.reading import Facts, Reader, Reading
from hpjob.topology.read.text import Source, is_cut_mark

TITLE = "ibnetdiscover"
_NODE = re.compile(r"^\W{0,8}(Switch|Ca|Rt)\s+([0-9]{1,4})\s+\"([SHR]-[0-9A-Za-z<>*_.x-]{1,80})\"\s*(?:#\s*(.*))?$")
_PORT = re.compile(
    r"^\W{0,8}\[([0-9]{1,4})\](?:\[[^\]]{0,20}\])?(\([^)]{0,40}\))?\s+\"([SHR]-[0-9A-Za-z<>*_.x-]{1,80})\"\[([0-9]{1,4})\](?:\[[^\]]{0,20}\])?"
    r"(?:\([^)]{0,40}\))?\s*(?:#\s*(.*))?$"
)
_ELISION = (".", "…", "[", "<", "(")
_QUOTED = re.compile(r"\"([^\"]*)\"")
_RATE = re.compile(r"\b([0-9]{1,2})x\s?([A-Z]{3}[0-9]{0,3})\b")
_LID = re.compile(r"\blid\s+([0-9]+)")
_PORT_GUID = re.compile(r"\"(H-[^\"\s]{1,80})\"\[([0-9]{1,4})\](?:\[[^\]\n]{0,20}\])?\(([^)\n]{0,40})\)")
_CA_ID = re.compile(r"Ca[ \t]+[0-9]{1,4}[ \t]+\"(H-[0-9a-fA-F]{1,16})\"")
_HEX = re.compile(r"[0-9a-fA-F]{1,16}")
_GUIDS_OF_A_CARD = 16
_BROKEN_ID = re.compile(r"[SHR]-(?:[0-9a-fA-F]{0,15}|[0-9a-fA-F]{17,})")
"""Ids have 16 digits; one with fewer or more was cut or glued."""
_WHOLE_ID = 18
_REDACTED = re.compile(r"\"[SHR]-[0-9A-Za-z]{0,16}(<[^>\"\n]{1,40}>)")
"""An author hides ids with one mark; another mark in the same text is that one, cut and glued."""
_HEX_ID = re.compile(r"[SHR]-[0-9a-fA-F]+")
_ANY_NODE = re.compile(r"^[^\n\"]{0,30}\b(?:Switch|Ca)\s+[0-9]+\s+\"[SHR]-")
_ANY_PORT = re.compile(r"[ \t]*\[[0-9]+\][^\n\"]{0,40}\"[SH]-")
_MAX_CANDIDATES = 20_000


def confidence(source: Source) -> float:
    """High when records with S- or H- ids are there."""
    if '"S-' not in source.text and '"H-' not in source.text:
        return 0.7 if "Topology file: generated" in source.text else 0.0
    ports = False
    for needle in ('"S-', '"H-'):
        for _, line in source.lines_with(needle, _MAX_CANDIDATES):
            if len(line) < 2000 and _ANY_NODE.search(line):
                return 0.95
            ports = ports or _ANY_PORT.match(line) is not None
    if "Topology file: generated" in source.text:
        return 0.7
    return 0.6 if ports else 0.0


def read(source: Source) -> Reading:
    """Read all records."""
    fabric = parse_fabric(source)
    hosts = find_hosts(fabric)
    facts = _facts(fabric, hosts)
    notes = _notes(fabric, facts)
    return Reading(kind="ibnetdiscover", facts=facts, topology=_topology(fabric, hosts, notes), notes=tuple(notes))


def parse_fabric(source: Source) -> Fabric:
    """Build the fabric; a port line belongs to the record above it."""
    fabric = Fabric()
    guids = {(node_id, int(port)): guid for node_id, port, guid in _PORT_GUID.findall(source.text)}
    nodes = {node_id for node_id, _ in guids}.union(_CA_ID.findall(source.text))
    marks = Counter(_REDACTED.findall(source.text)) if "<" in source.text else Counter()
    odd = tuple(mark for mark in marks if mark != marks.most_common(1)[0][0])
    current: NodeKey | None = None
    ends_at_blank = not _is_double_spaced(source.lines)
    order = RecordOrder()
    for line in source.lines:
        if '"' not in line or len(line) > 2000:
            if ("=" in line and order.attribute(line)) or (ends_at_blank and not line.strip()):
                current = None
            elif line[:1] in _ELISION and is_cut_mark(line):
                order.elision()
            continue
        node = None if line[0] == "[" and line[1:2].isdecimal() else _NODE.match(line)
        if node:
            order.record(node[3])
            glued = (node[4] or "").count('"') not in (0, 2)  # the rest of another line stands behind it
            current = None if glued or _is_broken(node[3]) or node[3].endswith(odd) else _record(fabric, node)
            continue
        port = _PORT.match(line)
        if port is not None:
            order.port()
        if port is None or current is None or _is_broken(port[3]) or port[3].endswith(odd):
            continue
        # Local ports of adapters carry a GUID, those of switches do not.
        if fabric.nodes[current].is_switch == bool(port[2]):
            fabric.disordered = True
        else:
            _cable(fabric, current, port, guids, nodes)
    fabric.disordered |= order.is_broken
    fabric.settle()
    return fabric


def _is_double_spaced(lines: list[str]) -> bool:
    """Whether a paste put an empty line behind every line, so that one does not end a record."""
    ports = [number for number, line in enumerate(lines) if number and line.lstrip()[:1] == "[" and '"' in line]
    return bool(ports) and sum(not lines[number - 1].strip() for number in ports) * 2 > len(ports)


def _record(fabric: Fabric, match: re.Match[str]) -> NodeKey:
    is_switch = match[1] == "Switch"
    quoted = _QUOTED.search(match[4] or "")
    key = _key(match[3], quoted[1] if quoted else None, match[4] or "")
    fabric.node(key, is_switch, quoted[1] if quoted else None).has_record = True
    return key


def _cable(
    fabric: Fabric, current: NodeKey, match: re.Match[str], guids: dict[tuple[str, int], str], nodes: set[str]
) -> None:
    own = _owns(current[0], int(match[1]), match[2], guids, nodes) if match[2] else None
    if own is False:
        fabric.disordered |= f"H-{(match[2] or '').strip('()').zfill(16)}" in nodes
        return
    description, behind, rate = _comment(match[5] or "")
    other = _key(match[3], description, behind)
    fabric.node(other, match[3].startswith("S-"), description)
    fabric.show((current, int(match[1])), (other, int(match[4])), sure=bool(own))
    if rate:
        fabric.rates.append(rate)


@lru_cache(maxsize=8192)
def _comment(comment: str) -> tuple[str | None, str, tuple[int, str] | None]:
    """Description, the words behind it and the rate; the same words stand at every cable of a switch."""
    quoted = _QUOTED.search(comment)
    behind = comment[quoted.end() :] if quoted else comment
    rate = _RATE.search(behind)
    return quoted[1] if quoted else None, behind, (int(rate[1]), rate[2]) if rate else None


def _is_broken(node_id: str) -> bool:
    return len(node_id) != _WHOLE_ID and _BROKEN_ID.fullmatch(node_id) is not None


def _owns(node_id: str, port: int, guid: str, guids: dict[tuple[str, int], str], nodes: set[str]) -> bool | None:
    """Whether an adapter's port line belongs to the record above it, by its GUID; None = it may.

    Port GUIDs follow the node's, or are what the switch at the other end prints for that port.
    """
    own, node = guid.strip("()"), node_id[2:]
    if not (_HEX.fullmatch(own) and _HEX.fullmatch(node)):
        return None
    if own == node:
        return True
    number, known = int(own, 16), guids.get((node_id, port), "")
    if _HEX.fullmatch(known):
        return int(known, 16) == number
    if number == int(node, 16):
        return True
    if f"H-{number:016x}" in nodes or abs(number - int(node, 16)) > _GUIDS_OF_A_CARD:
        return False
    return None


def _lid(text: str | None) -> str:
    match = _LID.search(text or "")
    return match[1] if match else ""


def _key(node_id: str, description: str | None, comment: str) -> NodeKey:
    """Ids that an author redacted are equal for different nodes; the description tells them apart, else the lid."""
    if _HEX_ID.fullmatch(node_id):
        return (node_id, "")
    return (node_id, (description or "").strip() or _lid(comment))


def _facts(fabric: Fabric, hosts: Hosts) -> Facts:
    switches, leaves = fabric.switches, fabric.leaves
    records = [n for n in fabric.nodes.values() if n.has_record and (n.is_hca or n.is_aggregation)]
    tiers = fabric.tiers
    by_tier = Counter(tiers[switch.key] for switch in switches if switch.key in tiers)
    hcas = fabric.hcas
    adapters = {key: len(fabric.hcas_of(key)) for key, node in fabric.nodes.items() if node.is_switch}
    ports = {hca.key: len(fabric.neighbours.get(hca.key, [])) for hca in hcas}
    widths = Counter(width for width, _ in fabric.rates)
    usual = max(widths, key=lambda width: (widths[width], width), default=0)
    switch_cables = sum(all(fabric.nodes[key].is_switch for key, _ in cable) for cable in fabric.cables)
    facts: Facts = {
        "switches": len(switches),
        "leaves": len(leaves),
        "spines": len(switches) - len(leaves),
        "tiers": ([by_tier[tier] for tier in range(max(by_tier) + 1)] if leaves else None) if switches else [],
        "leaf_groups": fabric.leaf_groups(),
        "switches_without_record": sum(node.is_switch and not node.has_record for node in fabric.nodes.values()),
        "hca_records": len(records),
        "hcas_of_switch": _summed({key: count for key, count in adapters.items() if count}),
        "hosts_named": len(hosts.names),
        "compute_hosts": len(hosts.compute),
        "not_compute": hosts.partial(),
        "undescribed_hcas": sum(hca.is_undescribed for hca in hcas),
        "aggregation_nodes": sum(node.is_aggregation for node in fabric.nodes.values()),
        "multi_port_hcas": _summed({key: count for key, count in ports.items() if count > 1}),
        "devices": sorted({hca.words[1] for hca in hcas if len(hca.words) > 1}),
        "cables": len(fabric.cables),
        "switch_to_switch": switch_cables,
        "rates": sorted({f"{width}x{speed}" for width, speed in fabric.rates}),
        "degraded_ends": sum(width < usual for width, _ in fabric.rates),
        "usable": bool(fabric.cables),
    }
    return facts | _rail_facts(fabric, hosts)


def _summed(counts: dict[NodeKey, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for (node_id, _), count in counts.items():
        found[node_id] = found.get(node_id, 0) + count
    return found


def _rail_facts(fabric: Fabric, hosts: Hosts) -> Facts:
    """Only where the leaves' names give rail and unit."""
    grid = {leaf.key: found for leaf in fabric.leaves if (found := rail_and_unit(leaf))}
    if not grid:
        return dict.fromkeys(("compute_hosts_per_unit", "rail_of_device", "swapped_cables", "leaves_missing"))
    units: Counter[str] = Counter()
    votes: dict[str, Counter[int]] = {}
    places: list[tuple[str, str, int]] = []
    for host in hosts.compute:
        here = [(grid[leaf], devices) for leaf, devices in hosts.leaves_of[host].items() if leaf in grid]
        if here:
            units[Counter(unit for (_, unit), _ in here).most_common(1)[0][0]] += 1
        for (rail, _), devices in here:
            for device in devices:
                votes.setdefault(device, Counter())[rail] += 1
                places.append((host, device, rail))
    rail_of = {device: votes[device].most_common(1)[0][0] for device in sorted(votes)}
    swapped: dict[str, list[str]] = {}
    for host, device, rail in places:
        if rail_of[device] != rail:
            swapped.setdefault(host, []).append(device)
    return {
        "compute_hosts_per_unit": {unit: units[unit] for unit in sorted(units)},
        "rail_of_device": rail_of,
        "swapped_cables": {host: sorted(swapped[host]) for host in sorted(swapped)},
        "leaves_missing": _missing(fabric, set(grid.values())),
    }


def _missing(fabric: Fabric, there: set[tuple[int, str]]) -> list[str]:
    names = [leaf.plain_name for leaf in fabric.leaves if rail_and_unit(leaf)]
    width = max(len(name.split("-r", 1)[1].split("-", 1)[0]) for name in names)
    rails, units = {rail for rail, _ in there}, {unit for _, unit in there}
    grid = {(rail, unit) for rail in rails for unit in units}
    return sorted(f"leaf-r{rail:0{width}d}-{unit}" for rail, unit in grid - there)


def _notes(fabric: Fabric, facts: Facts) -> list[str]:
    notes = [] if fabric.cables else ["no cable: the port is down, or the text shows too little"]
    if fabric.contradicted:
        notes.append(f"{fabric.contradicted} port lines contradict others and were left out")
    if facts["degraded_ends"]:
        notes.append(f"{facts['degraded_ends']} port lines show less width than the others")
    for host, devices in (facts["swapped_cables"] or {}).items():
        notes.append(f"{host}: {', '.join(devices)} plugged into another rail than on the other hosts")
    unnamed = sorted(hca.key[0] for hca in fabric.hcas if not hca.words)
    if unnamed:
        notes.append(f"{len(unnamed)} adapters without a host's name: {', '.join(unnamed[:8])}")
    return notes


def _topology(fabric: Fabric, hosts: Hosts, notes: list[str]) -> Topology:
    rails = rails_of_leaves(fabric, hosts)
    names = {key: fabric.nodes[key].plain_name for key in fabric.nodes}
    members: dict[NodeKey, list[str]] = {}
    nodes: list[Node] = []
    for host, leaves in hosts.leaves_of.items():
        nics = [
            Nic(
                name=device or host,
                link_layer="InfiniBand",
                active=True,
                leaf=names[leaf],
                rail=rails.get(leaf),
                rail_from="switch port" if leaf in rails else None,
            )
            for leaf, devices in leaves.items()
            for device in devices
        ]
        for leaf in leaves:
            members.setdefault(leaf, []).append(host)
        nodes.append(Node(name=host, nics=tuple(sorted(nics, key=lambda nic: nic.name))))
    tiers = fabric.tiers
    switches: list[Switch] = []
    for switch in fabric.switches:
        tier = tiers.get(switch.key, 0)
        below = {names[key] for key in fabric.neighbours.get(switch.key, []) if tiers.get(key, tier) < tier}
        hosts_here = tuple(members.get(switch.key, ())) if tier == 0 else ()
        switches.append(Switch(name=names[switch.key], level=tier, nodes=hosts_here, switches=tuple(sorted(below))))
    sources = {"switches": TITLE, **{f"nodes.{node.name}.nics": TITLE for node in nodes}}
    return Topology(nodes=tuple(nodes), switches=tuple(switches), source=TITLE, notes=tuple(notes), sources=sources)


READER = Reader(kind="ibnetdiscover", title=TITLE, confidence=confidence, read=read)
