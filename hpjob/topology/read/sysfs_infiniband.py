"""``/sys/class/infiniband`` as ``path: value`` lines (``grep -r .``) or under ``==> path <==`` (``head``, ``tail``)."""

from __future__ import annotations

import re

from hpjob.topology.model import Nic, Node, Topology
from hpjob.topology.read.reading import LOCAL_NODE, Facts, Reader, Reading
from hpjob.topology.read.text import Source, by_number

TITLE = "/sys/class/infiniband"
_ROW = re.compile(
    r"^[\s./]*(?:sys/\S{0,200}infiniband/)?([A-Za-z][\w.-]{1,40})/ports/([0-9]+)/(rate|state|link_layer|phys_state)\s*[:=](.*)$"
)
_TITLE = re.compile(r"^==>\s*(\S{1,300}/ports/[0-9]+/\w+)\s*<==\s*$")
_ANY = re.compile(r"/ports/[0-9]+/(?:rate|state|link_layer)\s*(?:[:=]|<==)")


def confidence(source: Source) -> float:
    """High when port files are there."""
    return 0.95 if "/ports/" in source.text and _ANY.search(source.text) else 0.0


def read(source: Source) -> Reading:
    """Read the first port of every device."""
    values: dict[str, dict[str, str]] = {}
    ports: dict[str, str] = {}
    path = ""
    for line in source.lines:
        title = _TITLE.match(line) if line[:3] == "==>" and len(line) < 500 else None
        if title:
            path = title[1]
            continue
        row = f"{path}: {line}" if path else line
        path = "" if line.strip() else path
        match = _ROW.match(row) if "/ports/" in row and len(row) < 900 else None
        if match is None:
            continue
        device, port, key, value = match.groups()
        found = values.setdefault(device, {})
        if ports.setdefault(device, port) == port:
            found.setdefault(key, value.strip())
    names = by_number(list(values))
    rates = {name: int(m[0]) for name in values if (m := re.match(r"[0-9]+", values[name].get("rate", "")))}
    states = [found.get("state", "") for found in values.values()]
    facts: Facts = {
        "devices": len(values),
        "infiniband": [name for name in names if values[name].get("link_layer") == "InfiniBand"],
        "ethernet": [name for name in names if values[name].get("link_layer") == "Ethernet"],
        "rate_gbit": rates,
        "all_active": all("ACTIVE" in state for state in states) if states and all(states) else None,
    }
    nics = tuple(_nic(name, values[name], rates) for name in names)
    node = Node(name=LOCAL_NODE, nics=nics)
    topology = Topology(nodes=(node,), source=TITLE, sources={f"nodes.{LOCAL_NODE}.nics": TITLE})
    return Reading(kind="sysfs_infiniband", facts=facts, topology=topology)


def _nic(name: str, found: dict[str, str], rates: dict[str, int]) -> Nic:
    layer = found.get("link_layer")
    return Nic.model_validate(
        {
            "name": name,
            "link_layer": layer if layer in ("InfiniBand", "Ethernet") else None,
            "active": "ACTIVE" in found["state"] if "state" in found else None,
            "rate_gbit_s": rates.get(name),
        }
    )


READER = Reader(kind="sysfs_infiniband", title=TITLE, confidence=confidence, read=read)
