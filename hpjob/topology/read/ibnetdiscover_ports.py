"""``ibnetdiscover -p``: one line per port, names quoted or not, padded or not."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpjob.topology.model import Nic, Node, Switch, Topology
from hpjob.topology.read.ib_fabric import IbNode
from hpjob.topology.read.reading import Facts, Reader, Reading
from hpjob.topology.read.text import Source

TITLE = "ibnetdiscover -p"
_ROW = re.compile(
    r"^\s*(CA|SW|RT)\s+([0-9]+)\s+([0-9]+)\s+(0x[0-9a-fA-F<>a-z]+)\s+([0-9]+x|\?\?x)\s+(\S+)"
    r"(?:\s+-\s+(CA|SW|RT)\s+([0-9]+)\s+([0-9]+)\s+(0x[0-9a-fA-F<>a-z]+))?\s*(.*)$"
)
_ANY_ROW = re.compile(r"^[ \t]*(?:CA|SW)[ \t]+[0-9]+[ \t]+[0-9]+[ \t]+0x[0-9a-fA-F]+[ \t]+[0-9?]+x[ \t]", re.M)
_KINDS = ("CA ", "CA\t", "SW ", "SW\t")
_QUOTED = re.compile(r"'([^']*)'")


@dataclass
class _End:
    kind: str
    port: int
    name: str
    padded: bool

    @property
    def node(self) -> IbNode:
        return IbNode((self.name, ""), self.kind == "SW", self.name)


def confidence(source: Source) -> float:
    """High when port rows are there."""
    return 0.95 if any(kind in source.text for kind in _KINDS) and _ANY_ROW.search(source.text) else 0.0


def read(source: Source) -> Reading:
    """Read all rows."""
    hosts: dict[str, dict[str, str]] = {}
    switches: dict[str, None] = {}
    links: set[tuple[str, str]] = set()
    aggregation: dict[str, None] = {}
    unconnected: list[list[str | int]] = []
    padded = False
    for line in source.lines:
        match = _ROW.match(line) if len(line) < 2000 and ("SW" in line or "CA" in line) else None
        if match is None:
            continue
        ends = _ends(match)
        padded |= any(end.padded for end in ends)
        switches.update({end.name: None for end in ends if end.kind == "SW" and end.name})
        if len(ends) == 1:
            unconnected.append([ends[0].name, ends[0].port])
        elif all(end.kind == "SW" for end in ends):
            first, second = sorted(end.name for end in ends)
            links.add((first, second))
        else:
            _attach(ends, hosts, aggregation)
    facts: Facts = {
        "hosts": hosts,
        "switches_seen": len(switches),
        "switch_links": [list(link) for link in sorted(links)],
        "aggregation_nodes_at": list(aggregation),
        "unconnected": unconnected,
        "names_need_strip": padded,
    }
    return Reading(kind="ibnetdiscover_p", facts=facts, topology=_topology(hosts, list(switches), links))


def _ends(match: re.Match[str]) -> list[_End]:
    rest = match[11].strip()
    quoted = _QUOTED.findall(rest)
    connected = match[7] is not None
    names = quoted
    if not quoted:
        names = rest.strip("() ").split(" - ", 1) if connected else [rest]
    names = [*names, "", ""]
    ends = [_End(match[1], int(match[3]), names[0].strip(), bool(quoted) and names[0] != names[0].strip())]
    if connected:
        ends.append(_End(match[7], int(match[9]), names[1].strip(), len(quoted) > 1 and names[1] != names[1].strip()))
    return ends


def _attach(ends: list[_End], hosts: dict[str, dict[str, str]], aggregation: dict[str, None]) -> None:
    adapter = next((end for end in ends if end.kind == "CA"), None)
    switch = next((end for end in ends if end.kind == "SW"), None)
    if adapter is None or switch is None:
        return
    if adapter.node.is_aggregation:
        aggregation[switch.name] = None
    elif adapter.node.words:
        words = adapter.node.words
        hosts.setdefault(words[0], {})[words[1] if len(words) > 1 else ""] = switch.name


def _topology(hosts: dict[str, dict[str, str]], switches: list[str], links: set[tuple[str, str]]) -> Topology:
    leaves: dict[str, list[str]] = {}
    for host, devices in hosts.items():
        for switch in dict.fromkeys(devices.values()):
            leaves.setdefault(switch, []).append(host)
    nodes = tuple(
        Node(
            name=host,
            nics=tuple(
                Nic(name=device or host, link_layer="InfiniBand", active=True, leaf=leaf)
                for device, leaf in ports.items()
            ),
        )
        for host, ports in hosts.items()
    )
    found: list[Switch] = []
    for name in switches:
        below = (
            sorted({b if a == name else a for a, b in links if name in (a, b)} & set(leaves))
            if name not in leaves
            else []
        )
        found.append(
            Switch(
                name=name, level=0 if name in leaves else 1, nodes=tuple(leaves.get(name, ())), switches=tuple(below)
            )
        )
    return Topology(nodes=nodes, switches=tuple(found), source=TITLE, sources={"switches": TITLE})


READER = Reader(kind="ibnetdiscover_p", title=TITLE, confidence=confidence, read=read)
