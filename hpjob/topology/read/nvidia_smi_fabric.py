"""NVLink fabric state: the Fabric section of ``nvidia-smi -q`` (also ``-x``), through pdsh, and the CSV query."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field

from hpjob.topology.model import Gpu, Node, NvlinkDomain, Topology
from hpjob.topology.read.reading import LOCAL_NODE, Facts, Reader, Reading
from hpjob.topology.read.text import Source

TITLE = "nvidia-smi -q (fabric)"
_FIELD = re.compile(
    r"^\s*(?:(?P<host>[A-Za-z0-9][A-Za-z0-9_.-]*):\s+)?"
    r"(?P<key>State|Status|CliqueId|Clique Id|ClusterUUID|Cluster UUID)"
    r"\s*:(?P<value>.*)$"
)
_FABRIC = re.compile(r"^\s*(?:(?P<host>[A-Za-z0-9][A-Za-z0-9_.-]*):\s+)?Fabric\s*$")
_INDENT = re.compile(r"^\s*")
_CSV_HEADER = re.compile(r"fabric\.\w+", re.I)
_XML_SECTION = re.compile(r"<fabric>(.{0,4000}?)</fabric>", re.S | re.I)
_XML_FIELD = re.compile(r"<(state|status|cliqueId|clusterUuid)>\s*([^<>]{0,100}?)\s*</", re.I)
_XML_NAMES = {"state": "State", "status": "Status", "cliqueid": "CliqueId", "clusteruuid": "ClusterUUID"}
_UUID = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_ZERO = re.compile(r"[0-]+")
_NOT_AVAILABLE = re.compile(r"\[?(?:N/A|Not Supported|Not Available)\]?", re.I)


@dataclass
class _Record:
    """Fabric state of one GPU, or one of several of a host."""

    key: str | int
    values: dict[str, str] = field(default_factory=dict)


def confidence(source: Source) -> float:
    """High when clique or cluster lines are there."""
    text = source.text
    if "<nvidia_smi_log>" in text and _XML_SECTION.search(text):
        return 0.97
    if "CliqueId" in text or "ClusterUUID" in text:
        return 0.9
    if "fabric" not in source.lower:
        return 0.0
    if "fabric." in source.lower and re.search(r"^[^\n]{0,200}fabric\.(?:clique|cluster|state)", text, re.I | re.M):
        return 0.9
    return 0.6 if re.search(r"^[ \t]*Fabric[ \t]*\n[ \t]*State[ \t]*:", text, re.M) else 0.0


def read(source: Source) -> Reading:
    """Read all records; those of several hosts are joined by host."""
    table = _xml_records(source) or _csv_records(source)
    records = table if table is not None else _section_records(source)
    per_host = any(isinstance(record.key, str) for record in records)
    shown = any("ClusterUUID" in record.values for record in records)
    facts = _facts(records, per_host, shown=shown)
    return Reading(kind="fabric", facts=facts, topology=_topology(facts, records, per_host))


def _xml_records(source: Source) -> list[_Record]:
    if "<fabric>" not in source.text:
        return []
    sections = _XML_SECTION.findall(source.text)
    return [
        _Record(number, {_XML_NAMES[name.lower()]: value for name, value in _XML_FIELD.findall(section)})
        for number, section in enumerate(sections)
    ]


def _csv_records(source: Source) -> list[_Record] | None:
    columns: list[str] | None = None
    records: list[_Record] = []
    for line in source.lines:
        if columns is None:
            if "," in line + "," and _CSV_HEADER.search(line[:2000]) and not line.lstrip().startswith(("$", "#")):
                names = [re.sub(r"[^a-z]", "", name.lower()) for name in line.split(",")]
                if "--query" not in line:
                    columns = names
            continue
        cells = next(csv.reader([line[:10_000]]), [])
        if len(cells) != len(columns):
            if records:
                break
            continue
        row = {name: cell.strip() for name, cell in zip(columns, cells, strict=True)}
        index = row.get("index", "")
        records.append(_Record(int(index) if index.isdecimal() else len(records), _named(row)))
    return records if columns is not None else None


def _named(row: dict[str, str]) -> dict[str, str]:
    names = {"fabricstate": "State", "fabriccliqueid": "CliqueId", "fabricclusteruuid": "ClusterUUID"}
    return {names[key]: value for key, value in row.items() if key in names}


def _section_records(source: Source) -> list[_Record]:
    """Records in the order of the text; a key that comes again begins the next one."""
    records: list[_Record] = []
    open_records: dict[str | None, _Record] = {}
    inside: dict[str | None, int] = {}
    counter = 0
    for line in source.lines:
        if len(line) > 1000 or (":" not in line and "Fabric" not in line):
            continue
        start = _FABRIC.match(line)
        if start:
            inside[start["host"]] = _indent(line)
            open_records.pop(start["host"], None)
            continue
        match = _FIELD.match(line)
        if match is None:
            continue
        host, key, value = match["host"], match["key"].replace(" ", ""), match["value"].strip()
        if key in ("State", "Status") and not _belongs(inside.get(host), line, open_records.get(host)):
            continue
        current = open_records.get(host)
        if current is None or key in current.values:
            current = _Record(host if host is not None else counter, {})
            counter += host is None
            records.append(current)
            open_records[host] = current
        current.values[key] = value
    return records


def _indent(line: str) -> int:
    match = _INDENT.match(line)
    return len(match[0].expandtabs(8)) if match else 0


def _belongs(fabric_indent: int | None, line: str, current: _Record | None) -> bool:
    """``State`` occurs in many sections of ``-q``; only the fabric's counts."""
    if fabric_indent is not None:
        return current is None or not {"CliqueId", "ClusterUUID"} & set(current.values)
    return current is not None and "State" not in current.values and bool(current.values)


def _facts(records: list[_Record], per_host: bool, shown: bool) -> Facts:
    uuids = {record.values.get("ClusterUUID", "N/A") for record in records}
    plain = [uuid for uuid in uuids if not _NOT_AVAILABLE.fullmatch(uuid)]
    states = [record.values["State"] for record in records if "State" in record.values]
    refused = list(dict.fromkeys(record.key for record in records if _malformed(record)))
    domains = _domains(records, set(refused)) if shown else None
    return {
        "gpus": None if per_host else len(records),
        "state": states[0] if states else None,
        "cluster_uuid": plain[0] if len(uuids) == 1 and plain and not per_host else None,
        "clique_of_gpu": None if per_host else [_clique(record) for record in records],
        "domains": domains,
        "multi_node_domain": None if domains is None else bool(domains),
        "refused": refused,
    }


def _clique(record: _Record) -> int | None:
    value = record.values.get("CliqueId", "")
    return int(value) if value.isdecimal() else None


def _malformed(record: _Record) -> bool:
    clique = record.values.get("CliqueId", "N/A")
    uuid = record.values.get("ClusterUUID", "N/A")
    return not (
        (clique.isdecimal() or _NOT_AVAILABLE.fullmatch(clique))
        and (_UUID.fullmatch(uuid) or _NOT_AVAILABLE.fullmatch(uuid))
    )


def _domains(records: list[_Record], refused: set[str | int]) -> dict[str, list[str | int]]:
    found: dict[str, list[str | int]] = {}
    for record in records:
        uuid = record.values.get("ClusterUUID", "N/A")
        clique = record.values.get("CliqueId", "")
        if record.key in refused or not _UUID.fullmatch(uuid) or _ZERO.fullmatch(uuid) or not clique.isdecimal():
            continue
        members = found.setdefault(f"{uuid}.{clique}", [])
        if record.key not in members:
            members.append(record.key)
    return found


def _topology(facts: Facts, records: list[_Record], per_host: bool) -> Topology | None:
    domains: dict[str, list[str | int]] | None = facts["domains"]
    if per_host:
        names = list(dict.fromkeys(str(record.key) for record in records))
        nodes = tuple(Node(name=name) for name in names)
    else:
        nodes = (Node(name=LOCAL_NODE, gpus=tuple(Gpu(index=int(record.key)) for record in records)),)
    waiting = {record.key for record in records if record.values.get("State", "Completed") != "Completed"}
    found = None
    if domains is not None:
        # One that a GPU has not joined yet carries no traffic, though it has a name.
        found = tuple(
            NvlinkDomain(name=name, nodes=tuple(str(m) for m in members) if per_host else (LOCAL_NODE,))
            for name, members in domains.items()
            if not waiting.intersection(members)
        )
    notes = ("not every GPU has completed joining its NVLink domain",) if domains and waiting else ()
    return Topology(nodes=nodes, domains=found, source=TITLE, notes=notes, sources={"domains": TITLE})


READER = Reader(kind="fabric", title=TITLE, confidence=confidence, read=read)
