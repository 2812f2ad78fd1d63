"""What Slurm says of each node: ``scontrol show node`` (text and JSON) and ``sinfo``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from hpjob.topology.model import Gpu, Node, Topology
from hpjob.topology.read.reading import Facts, Reader, Reading
from hpjob.topology.read.slurm_hostlist import expand_hosts
from hpjob.topology.read.text import Source

TITLE = "Slurm node records"
_RECORD = re.compile(r"(?:^|(?<=\s))NodeName=(\S+)")
_PAIR = re.compile(r"(?:^|(?<=\s))([A-Za-z]{2,24})=(\S*)")
_GRES_GPU = re.compile(r"gpu(?::([\w.-]*[A-Za-z][\w.-]*))?(?::([0-9]+))?(?:\(|,|$)")
_SINFO_COLUMNS = (
    "PARTITION", "AVAIL", "TIMELIMIT", "NODES", "STATE", "CPUS", "MEMORY", "GRES", "GRES_USED", "S:C:T", "REASON",
    "AVAIL_FEATURES", "ACTIVE_FEATURES", "TMP_DISK", "WEIGHT", "CPUS(A/I/O/T)", "NODES(A/I/O/T)", "FREE_MEM",
)  # fmt: skip
_NAMES = ("NODELIST", "HOSTNAMES")
_MAX_CANDIDATES = 5_000
_JSON_NODES = re.compile(r"\"(?:nodes|sinfo)\"\s*:\s*\[")
MAX_GPUS = 64
UNUSABLE = (
    "DOWN",
    "DRAIN",
    "DRAINED",
    "DRAINING",
    "FAIL",
    "FAILING",
    "MAINT",
    "NOT_RESPONDING",
    "POWERED_DOWN",
    "REBOOT",
)


@dataclass
class _NodeFacts:
    gres: str | None = None
    cpus: int | None = None
    memory_mib: int | None = None
    states: list[str] = field(default_factory=list)
    partitions: list[str] = field(default_factory=list)


def confidence(source: Source) -> float:
    """High when node records or a sinfo table are there."""
    if "NodeName=" in source.text and re.search(r"NodeName=\S+\s+(?:Arch=|CoresPerSocket=|Name=|State=)", source.text):
        return 0.92
    if any(_columns(line) for name in _NAMES for _, line in source.lines_with(name, _MAX_CANDIDATES)):
        return 0.9
    has_json = '"nodes"' in source.text or '"sinfo"' in source.text
    if (
        has_json
        and _JSON_NODES.search(source.text)
        and re.search(r"\"(?:gres|partitions|partition)\"\s*:", source.text)
    ):
        return 0.9
    return 0.4 if "NodeName=" in source.text and _RECORD.search(source.text) else 0.0


def _columns(line: str) -> tuple[str, list[str]] | None:
    """Separator and names of a header of sinfo: a column of host names and another that sinfo has."""
    if len(line) > 1000:
        return None
    separator = "|" if "|" in line else ""
    names = [name.strip() for name in (line.split("|") if separator else line.split())]
    known = any(name in names for name in _NAMES) and any(name in _SINFO_COLUMNS for name in names)
    return (separator, names) if known else None


def read(source: Source) -> Reading:
    """Read all nodes of the text."""
    found = _read_json(source.text) if _JSON_NODES.search(source.text) else None
    if found is None:
        found = _read_records(source.text) if _RECORD.search(source.text) else _read_sinfo(source)
    gpus = {name: _gpu_count(node.gres) for name, node in found.items()}
    unusable = [name for name, node in found.items() if _is_unusable(node.states)]
    facts: Facts = {
        "nodes": len(found) or None,
        "gpus_of_node": {name: count for name, (count, _) in gpus.items()},
        "gpu_types": sorted({kind for _, kind in gpus.values() if kind}),
        "state_of_node": {name: "+".join(node.states) or None for name, node in found.items()},
        "unusable": unusable,
        "partitions": sorted({partition for node in found.values() for partition in node.partitions}),
    }
    nodes = tuple(_node(name, node, *gpus[name]) for name, node in found.items())
    notes = (f"not usable: {', '.join(unusable[:20])}",) if unusable else ()
    topology = Topology(nodes=nodes, source=TITLE, notes=notes, sources={"nodes": TITLE}) if nodes else None
    return Reading(kind="slurm_nodes", facts=facts, topology=topology, notes=notes)


def _node(name: str, node: _NodeFacts, gpus: int | None, kind: str | None) -> Node:
    return Node(
        name=name,
        gpus=tuple(Gpu(index=index, model=kind) for index in range(min(gpus or 0, MAX_GPUS))),
        cpus=node.cpus,
        memory_gib=None if node.memory_mib is None else node.memory_mib / 1024,
        state="+".join(node.states).lower() or None,
    )


def _is_unusable(states: list[str]) -> bool:
    return any(state.strip("*~#!%$@^-").upper() in UNUSABLE for state in states)


def _gpu_count(gres: str | None) -> tuple[int | None, str | None]:
    """Count and type; None = the text does not print Gres."""
    if gres is None:
        return None, None
    total = 0
    kind = None
    for match in _GRES_GPU.finditer(gres):
        total += min(int(match[2]) if match[2] and len(match[2]) < 5 else 1, MAX_GPUS)
        kind = match[1] or kind
    return total, kind


def _number(text: Any) -> int | None:
    if isinstance(text, dict):
        text = text.get("number")
    return int(text) if str(text).isdecimal() and len(str(text)) < 16 else None


def _read_records(text: str) -> dict[str, _NodeFacts]:
    found: dict[str, _NodeFacts] = {}
    starts = list(_RECORD.finditer(text))
    for match, following in zip(starts, [*starts[1:], None], strict=True):
        body = text[match.start() : following.start() if following else len(text)]
        values: dict[str, str] = {}
        for pair in _PAIR.finditer(body[:20_000]):
            values.setdefault(pair[1].lower(), pair[2])  # a reason or a comment may hold anything behind
        node = _NodeFacts(
            gres=values.get("gres") if "gres" in values else None,
            cpus=_number(values.get("cputot", values.get("cpus"))),
            memory_mib=_number(values.get("realmemory")),
            states=[state for state in values.get("state", "").split("+") if state],
            partitions=[part for part in values.get("partitions", "").split(",") if part],
        )
        for name in expand_hosts(match[1]) or []:
            found[name] = node
    return found


def _read_json(text: str) -> dict[str, _NodeFacts] | None:
    start = text.find("{")
    try:
        document, _ = json.JSONDecoder().raw_decode(text[max(start, 0) :])
    except (json.JSONDecodeError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    found: dict[str, _NodeFacts] = {}
    for entry in [*_dicts(document.get("nodes")), *_dicts(document.get("sinfo"))]:
        _read_entry(entry, found)
    return found


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _strings(value: Any) -> list[str]:
    return (
        [str(item) for item in value] if isinstance(value, list) else ([str(value)] if isinstance(value, str) else [])
    )


def _read_entry(entry: dict[str, Any], found: dict[str, _NodeFacts]) -> None:
    """One node of ``scontrol show node --json`` or one group of ``sinfo --json``."""
    group = entry.get("nodes") if isinstance(entry.get("nodes"), dict) else {}
    names = _strings(group.get("nodes")) if group else _strings(entry.get("name"))
    state = entry.get("state")
    if isinstance(entry.get("node"), dict):
        state = entry["node"].get("state", state)
    gres = entry.get("gres")
    if isinstance(gres, dict):
        gres = gres.get("total")
    partition = entry.get("partition")
    partitions = _strings(partition.get("name")) if isinstance(partition, dict) else _strings(entry.get("partitions"))
    cpus = entry.get("cpus")
    memory = entry.get("real_memory", entry.get("memory"))
    node = _NodeFacts(
        gres=gres if isinstance(gres, str) else None,
        cpus=_number(cpus.get("maximum") if isinstance(cpus, dict) and "maximum" in cpus else cpus),
        memory_mib=_number(memory.get("maximum") if isinstance(memory, dict) and "maximum" in memory else memory),
        states=_strings(state),
        partitions=partitions,
    )
    for text in names:
        for name in expand_hosts(text) or []:
            known = found.setdefault(name, node)
            if known is not node:
                known.partitions.extend(part for part in partitions if part not in known.partitions)


def _read_sinfo(source: Source) -> dict[str, _NodeFacts]:
    """Any table of sinfo whose header names its columns."""
    header: tuple[str, list[str]] | None = None
    found: dict[str, _NodeFacts] = {}
    for line in source.lines:
        if len(line) > 200_000:
            continue
        header = (_columns(line) if any(name in line for name in _NAMES) else None) or header
        if header is None:
            continue
        separator, columns = header
        words = [word.strip() for word in line.split("|")] if separator else line.split()
        if len(words) < len(columns) or words[: len(columns)] == columns:
            continue
        row = dict(zip(columns, words, strict=False))
        names = expand_hosts(row.get("NODELIST", row.get("HOSTNAMES", ""))) or []
        for name in names:
            node = found.setdefault(name, _NodeFacts())
            node.gres = row.get("GRES", node.gres)
            node.cpus = _number(row.get("CPUS")) or node.cpus
            node.memory_mib = _number(row.get("MEMORY")) or node.memory_mib
            node.states = node.states or [row["STATE"]] if "STATE" in row else node.states
            if "PARTITION" in row and row["PARTITION"].rstrip("*") not in node.partitions:
                node.partitions.append(row["PARTITION"].rstrip("*"))
    return found


READER = Reader(kind="slurm_nodes", title=TITLE, confidence=confidence, read=read)
