"""Input of the fabric simulator ibsim: near to ibnetdiscover's output, but not the same language."""

from __future__ import annotations

import re

from hpjob.topology.model import Node, Switch, Topology
from hpjob.topology.read.reading import Facts, Reader, Reading
from hpjob.topology.read.text import Source

TITLE = "ibsim network"
_NODE = re.compile(r"^\s*(Switch|Hca|Ca|Rt)\s+([0-9]{1,4})\s+\"([^\"]{1,200})\"")
_PORT = re.compile(r"^\s*\[([0-9]{1,4})\](?:\([^)]{0,40}\))?\s*\"([^\"]{1,200})\"\s*\[([0-9]{1,4})\]")
_HCA = re.compile(r"[ \t]*Hca[ \t]+[0-9]+[ \t]+\"")
_PLAIN_SWITCH = re.compile(r"[ \t]*Switch[ \t]+[0-9]+[ \t]+\"(?!S-)")
_MAX_CANDIDATES = 20_000
End = tuple[str, int]


def confidence(source: Source) -> float:
    """Certain when the Hca keyword or plain node ids are there, which ibnetdiscover never prints."""
    if '"' not in source.text or ("Hca" not in source.text and "Switch" not in source.text):
        return 0.0
    if any(_HCA.match(line) for _, line in source.lines_with("Hca", _MAX_CANDIDATES)):
        return 0.97
    return 0.93 if any(_PLAIN_SWITCH.match(line) for _, line in source.lines_with("Switch", _MAX_CANDIDATES)) else 0.0


def read(source: Source) -> Reading:
    """Read all records; ``#`` begins a comment."""
    kinds: dict[str, bool] = {}
    cables: set[frozenset[End]] = set()
    current: str | None = None
    for line in source.lines:
        if '"' not in line or len(line) > 2000 or line.lstrip().startswith("#"):
            continue
        node = _NODE.match(line)
        if node:
            current = node[3]
            kinds.setdefault(current, node[1] == "Switch")
            continue
        port = _PORT.match(line)
        if port and current is not None:
            cables.add(frozenset(((current, int(port[1])), (port[2], int(port[3])))))
    pairs = [[name for name, _ in cable] for cable in cables if len(cable) == 2]
    switches = [name for name, is_switch in kinds.items() if is_switch]
    hcas = [name for name, is_switch in kinds.items() if not is_switch]
    below: dict[str, set[str]] = {name: set() for name in switches}
    ports = dict.fromkeys(hcas, 0)
    for a, b in pairs:
        for one, other in ((a, b), (b, a)):
            if one in below and other in ports:
                below[one].add(other)
            if one in ports:
                ports[one] += 1
    facts: Facts = {
        "switches": len(switches),
        "hcas": len(hcas),
        "cables": len(pairs),
        "switch_to_switch": sum(a in below and b in below for a, b in pairs),
        "hcas_by_switch": {name: sorted(below[name]) for name in switches},
        "ports_of_hca": ports,
    }
    topology = Topology(
        nodes=tuple(Node(name=name) for name in hcas),
        switches=tuple(Switch(name=n, level=0 if below[n] else 1, nodes=tuple(sorted(below[n]))) for n in switches),
        source=TITLE,
        sources={"switches": TITLE},
    )
    return Reading(kind="ibsim_net", facts=facts, topology=topology)


READER = Reader(kind="ibsim_net", title=TITLE, confidence=confidence, read=read)
