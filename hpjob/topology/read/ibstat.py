"""``ibstat`` and ``ibstatus``: state, rate and link layer of the first port of each adapter."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hpjob.topology.model import Nic, Node, Topology
from hpjob.topology.read.reading import LOCAL_NODE, Facts, Reader, Reading
from hpjob.topology.read.text import Source

TITLE = "ibstat"
_CA = re.compile(r"^.{0,60}?\bCA '([^']{1,64})'")
_STATUS_DEVICE = re.compile(r"^.{0,60}?Infiniband device '([^']{1,64})' port ([0-9]+) status", re.I)
_PORT = re.compile(r"^\W*Port ([0-9]+):\s*$")
_FIELD = re.compile(r"^\s*([A-Za-z][A-Za-z_ ]{2,30}?)\s*:(.*)$")
_PANIC = re.compile(r"stat of IB device '([^']{1,64})' failed")
_STATES = {
    "active",
    "down",
    "initializing",
    "initialize",
    "init",
    "armed",
    "no state change",
    "nop",
    "active_defer",
    "unknown",
}
_PHYSICAL = {
    "linkup", "disabled", "polling", "sleep", "portconfigurationtraining", "linkerrorrecovery", "phytest", "phy test",
    "no state change", "link error recovery", "port configuration training", "unknown",
}  # fmt: skip
_LAYERS = {"infiniband", "ethernet", "unspecified"}
_KEYS = {
    "system image guid": "card",
    "state": "state",
    "physical state": "phys",
    "phys state": "phys",
    "rate": "rate",
    "link layer": "layer",
    "link_layer": "layer",
}
_KNOWN = {"state": _STATES, "phys": _PHYSICAL, "layer": _LAYERS}


@dataclass
class _Adapter:
    values: dict[str, str] = field(default_factory=dict)
    port: int | None = None


def confidence(source: Source) -> float:
    """High when adapters are named the way the tool does."""
    if "CA '" not in source.text and "Infiniband device" not in source.text and "ibpanic" not in source.text:
        return 0.0
    if re.search(r"^.{0,60}?\bCA '[^'\n]+'", source.text, re.M) or "Infiniband device '" in source.text:
        return 0.95
    return 0.5 if _PANIC.search(source.text) else 0.0


def read(source: Source) -> Reading:
    """Read all adapters; a value that the text cuts is not shown."""
    adapters: dict[str, _Adapter] = {}
    current: _Adapter | None = None
    last = max((number for number, line in enumerate(source.lines) if line.strip()), default=0)
    for number, line in enumerate(source.lines):
        if len(line) > 500 or ("'" not in line and ":" not in line):
            continue
        found = (_CA.match(line) or _STATUS_DEVICE.match(line)) if "'" in line else None
        if found:
            current = adapters.setdefault(found[1], _Adapter())
            current.port = int(found[2]) if found.re is _STATUS_DEVICE else None
            continue
        port = _PORT.match(line) if "Port" in line else None
        if port and current is not None:
            current.port = int(port[1])
        elif current is not None and ":" in line:
            _set(current, line, at_end=number == last)
    panic = _PANIC.search(source.text)
    cas = {name: _ca(adapter) for name, adapter in adapters.items()}
    facts: Facts = {
        "cas": cas,
        "active": [name for name, ca in cas.items() if ca["state"] == "Active"],
        "same_card": _same_card(cas),
        "failed_device": panic[1] if panic else None,
    }
    notes = (f"ibstat failed at {panic[1]}: the list is not complete",) if panic else ()
    nics = tuple(_nic(name, ca) for name, ca in cas.items())
    node = Node(name=LOCAL_NODE, nics=nics)
    topology = Topology(nodes=(node,), source=TITLE, notes=notes, sources={f"nodes.{LOCAL_NODE}.nics": TITLE})
    return Reading(kind="ibstat", facts=facts, topology=topology, notes=notes)


def _set(adapter: _Adapter, line: str, at_end: bool) -> None:
    match = _FIELD.match(line)
    key = _KEYS.get(match[1].strip().lower()) if match else None
    if match is None or key is None or (key != "card" and adapter.port not in (1, None)):
        return
    value = match[2].strip()
    value = re.sub(r"^[0-9]+:\s+", "", value) if key in _KNOWN else value
    if "..." in value or "…" in value or not value:
        return
    if at_end and (value.lower() not in _KNOWN[key] if key in _KNOWN else len(value) < 18):
        return
    adapter.values.setdefault(key, value)


def _ca(adapter: _Adapter) -> Facts:
    rate = re.match(r"[0-9]+", adapter.values.get("rate", ""))
    state = adapter.values.get("state")
    return {
        "card": adapter.values.get("card"),
        "state": state.capitalize() if state and state.isupper() else state,
        "phys": adapter.values.get("phys"),
        "rate": int(rate[0]) if rate else None,
        "layer": adapter.values.get("layer"),
    }


def _same_card(cas: dict[str, Facts]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name, ca in cas.items():
        if ca["card"] is not None:
            groups.setdefault(ca["card"], []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _nic(name: str, ca: Facts) -> Nic:
    layer = {"infiniband": "InfiniBand", "ethernet": "Ethernet"}.get((ca["layer"] or "").lower())
    return Nic.model_validate(
        {
            "name": name,
            "link_layer": layer,
            "active": None if ca["state"] is None else ca["state"] == "Active",
            "rate_gbit_s": ca["rate"],
        }
    )


READER = Reader(kind="ibstat", title=TITLE, confidence=confidence, read=read)
