"""``ibdev2netdev`` (also ``-v``): RDMA devices and their network interfaces.

Up and Down are the state of the IP interface, not of the InfiniBand link.
"""

from __future__ import annotations

import re

from hpjob.topology.model import Nic, Node, Topology
from hpjob.topology.read.reading import LOCAL_NODE, Facts, Reader, Reading
from hpjob.topology.read.text import Source, by_number

TITLE = "ibdev2netdev"
_ROW = re.compile(
    r"^(?P<left>.{0,400}?)\bport\s+(?P<port>[0-9]+)\s*(?:\(\s*\w+\s*\)\s*)?==>\s*(?P<interface>\S+)\s*\((?P<state>\w+)\)(?P<rest>.*)$"
)
_PCI = re.compile(r"(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", re.I)
_PLACE = re.compile(r"#.*?\b([0-9]{1,3})/([0-9]{1,3})\b")
_ANY_ROW = re.compile(r"port\s+[0-9]+\s*(?:\(\s*\w+\s*\)\s*)?==>\s*\S+")


def confidence(source: Source) -> float:
    """High when rows with the arrow are there."""
    return 0.95 if "==>" in source.text and _ANY_ROW.search(source.text) else 0.0


def read(source: Source) -> Reading:
    """Read all rows."""
    interfaces: dict[str, list[str]] = {}
    state: dict[str, str] = {}
    places: dict[str, int] = {}
    for line in source.lines:
        match = _ROW.match(line) if "==>" in line and len(line) < 2000 else None
        device = _device(match["left"]) if match else None
        if match is None or device is None:
            continue
        interfaces.setdefault(device, []).append(match["interface"])
        if state.get(device) != "up":
            state[device] = match["state"].lower()
        place = _PLACE.search(match["rest"])
        if place:
            places.setdefault(device, int(place[1]))
    infiniband = [name for name, names in interfaces.items() if any(i.startswith("ib") for i in names)]
    ethernet = [name for name, names in interfaces.items() if any(i.startswith(("en", "eth")) for i in names)]
    bonds: dict[str, list[str]] = {}
    for device, names in interfaces.items():
        for interface in names:
            if interface.startswith("bond"):
                bonds.setdefault(interface, []).append(device)
    ordered = sorted((places[name], name) for name in infiniband if name in places)
    facts: Facts = {
        "devices": len(interfaces),
        "infiniband": by_number(infiniband),
        "ethernet": by_number(ethernet),
        "bonds": {bond: by_number(devices) for bond, devices in bonds.items()},
        "ip_up": by_number([name for name, value in state.items() if value == "up"]),
        "ip_down": by_number([name for name, value in state.items() if value == "down"]),
        "rail_order": [name for _, name in ordered] or None,
    }
    rails = {name: rail for rail, (_, name) in enumerate(ordered)}
    nics = tuple(_nic(name, interfaces[name], rails) for name in by_number(list(interfaces)))
    node = Node(name=LOCAL_NODE, nics=nics)
    topology = Topology(nodes=(node,), source=TITLE, sources={f"nodes.{LOCAL_NODE}.nics": TITLE})
    return Reading(kind="ibdev2netdev", facts=facts, topology=topology)


def _device(left: str) -> str | None:
    """The RDMA device: the first word, or the one behind a PCI address with ``-v``."""
    words = [word for word in left.split() if not _PCI.fullmatch(word)]
    return words[0].rstrip(":") if words else None


def _nic(name: str, interfaces: list[str], rails: dict[str, int]) -> Nic:
    return Nic(
        name=name,
        link_layer="InfiniBand" if any(i.startswith("ib") for i in interfaces) else "Ethernet",
        rail=rails.get(name),
        rail_from="text" if name in rails else None,
    )


READER = Reader(kind="ibdev2netdev", title=TITLE, confidence=confidence, read=read)
