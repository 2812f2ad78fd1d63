"""Google Cloud: physical host of an instance, reserved blocks and sub-blocks, tables of physical hosts.

Copies of the documentation have lost their indentation, so ``key: value`` lines are read without it.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import Any

from hpjob.topology.read.cloud_facts import CloudHosts, cloud_reading, is_elided
from hpjob.topology.read.reading import Reader, Reading
from hpjob.topology.read.structured import load_json, load_yaml, walk
from hpjob.topology.read.text import Source

TITLE = "Google Cloud physical host"
_LINE = re.compile(r"^\s*(-\s+)?[\"']?([A-Za-z][A-Za-z0-9_.]{1,60})[\"']?\s*:(.*)$")
_PATH = re.compile(r"(?:^|[\s\"'=:])(/[\w-]{3,64}/[\w-]{3,64}(?:/[\w-]{3,64})?)(?=[\s\"',]|$)")
_MARK = re.compile(
    r"physicalHostTopology|physicalHost\b|physical_host\b|physicalTopology|reservation(?:Sub)?Block\b", re.I
)
_LABEL = re.compile(r"(?:cloud\.google\.com/gce-topology-|kubernetes\.io/(?=hostname))(\w*)")
"""Labels of Kubernetes nodes name the same layers."""
_INDENTED = re.compile(r"^[ \t]+(?:-[ \t]+)?[\"']?(?:cluster|block|sub[bB]lock|host|physicalHost)[\"']?[ \t]*:", re.M)
_NAMES = (("name", "name"), ("instanceId", "instance_id"), ("id", "instance_id"))
_HOST_KEYS = {"instanceid": "instance_id", "name": "name", "id": "instance_id", "hostname": "name"}


def confidence(source: Source) -> float:
    """High when the physical topology or host is named."""
    if "/gce-topology-" in source.text:
        return 0.93
    marks = ("physicalhost", "physical_host", "physicaltopology", "reservationblock", "reservationsubblock")
    return 0.9 if any(mark in source.lower for mark in marks) and _MARK.search(source.text) else 0.0


def read(source: Source) -> Reading:
    """Read a table of hosts, else keys and values in order."""
    if "/gce-topology-" in source.text:
        source = Source(_LABEL.sub(r"\1", source.text))
    found = _table(source) or _structured(source) or _records(_pairs(source))
    if is_elided(source.text):
        found.complete = False
    return cloud_reading(found, TITLE)


def _table(source: Source) -> CloudHosts | None:
    """Columns hostname and physical_host, perhaps rank."""
    columns: list[str] = []
    found = CloudHosts("gcp", "name")
    ranks: list[int] = []
    for line in source.lines:
        if not columns and "hysical" not in line and "PHYSICAL" not in line:
            continue
        words = line.split() if len(line) < 2000 else []
        if "physical_host" in words or "physicalHost" in words or "PHYSICAL_HOST" in words:
            columns = [word.lower().replace("physicalhost", "physical_host") for word in words]
            continue
        if not columns or len(words) != len(columns):
            continue
        row = dict(zip(columns, words, strict=True))
        if not row["physical_host"].startswith("/"):
            continue
        host = row.get("hostname") or row.get("name") or row.get("host") or words[0]
        found.layers[host] = [part for part in row["physical_host"].split("/") if part][:-1]
        if row.get("rank", "").isdecimal():
            ranks.append(int(row["rank"]))
    if not found.layers:
        return None
    steps = Counter(b - a for a, b in itertools.pairwise(ranks))
    found.gpus_per_node = steps.most_common(1)[0][0] if steps else None
    return found


def _structured(source: Source) -> CloudHosts | None:
    """Hosts of a JSON or indented YAML document; None when it shows none that way."""
    text = source.text
    loaded = load_json(text) if "{" in text else None
    if (loaded is None or not loaded[0]) and _INDENTED.search(text):
        loaded = (load_yaml(text), True)
    if loaded is None or not loaded[0]:
        return None
    found = CloudHosts("gcp", None, complete=loaded[1])
    for entry in walk(loaded[0]):
        status = entry.get("resourceStatus")
        status = status if isinstance(status, dict) else entry
        place, path = status.get("physicalHostTopology"), status.get("physicalHost")
        name = next(((kind, str(entry[key])) for key, kind in _NAMES if entry.get(key)), None)
        if name is None or not (isinstance(place, dict) or isinstance(path, str)):
            continue
        layers = _layers(place) if isinstance(place, dict) else []
        if not layers and isinstance(path, str):
            layers = [part for part in path.split("/") if part][:-1]
        found.node_id = name[0]
        found.layers[name[1]] = layers
        if isinstance(entry.get("zone"), str):
            found.zones.add(entry["zone"].rsplit("/", 1)[-1])
    has_block = any("physicalTopology" in entry for entry in walk(loaded[0]))
    return found if found.layers and not has_block else None


def _layers(place: dict[str, Any]) -> list[str]:
    lower = {str(key).lower(): value for key, value in place.items()}
    return [str(lower[key]) for key in ("cluster", "block", "subblock") if lower.get(key)]


def _pairs(source: Source) -> list[tuple[bool, str, str]]:
    """Keys and scalar values in the order of the text: (begins an item, key, value)."""
    if "{" in source.text and "}" in source.text:
        loaded = load_json(source.text)
        if loaded is not None and isinstance(loaded[0], (dict, list)):
            pairs: list[tuple[bool, str, str]] = []
            _flatten(loaded[0], pairs, 0)
            if not loaded[1]:
                pairs.append((False, "nextpagetoken", "cut"))
            return pairs
    found: list[tuple[bool, str, str]] = []
    for line in source.lines:
        match = _LINE.match(line) if ":" in line and len(line) < 2000 else None
        if match:
            found.append((bool(match[1]), match[2].lower(), match[3].strip().rstrip(",").strip("\"' ")))
    return found


def _flatten(value: object, pairs: list[tuple[bool, str, str]], depth: int) -> None:
    if depth > 60:
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, (dict, list)):
                pairs.append((False, str(key).lower(), ""))
                _flatten(inner, pairs, depth + 1)
            else:
                pairs.append((False, str(key).lower(), "" if inner is None else str(inner)))
    elif isinstance(value, list):
        for inner in value:
            pairs.append((True, "", ""))
            _flatten(inner, pairs, depth + 1)


class _Scan:
    """Collects hosts while walking over the pairs."""

    def __init__(self) -> None:
        self.found = CloudHosts("gcp", None)
        self.shared: dict[str, str] = {}
        self.host: dict[str, str] = {}
        self.name: tuple[str, str] | None = None
        self.in_instances = False

    def flush(self) -> None:
        """End one host."""
        merged = {**self.shared, **self.host}
        path = [merged[key] for key in ("cluster", "block", "subblock") if merged.get(key)]
        if not path and merged.get("physicalhost"):
            path = [part for part in merged["physicalhost"].split("/") if part][:-1]
        if path and self.name is not None and (self.host or self.in_instances):
            self.found.node_id = self.name[0]
            self.found.layers[self.name[1]] = path
        elif path and self.host:
            self.found.loose_paths.append(path)
        self.host, self.name = {}, None


def _records(pairs: list[tuple[bool, str, str]]) -> CloudHosts:
    scan = _Scan()
    resource_view = any(key == "physicaltopology" for _, key, _ in pairs)
    for begins, key, value in pairs:
        if begins and (scan.host or scan.name):
            scan.flush()
        _take(scan, key, value, resource_view)
    scan.flush()
    found = scan.found
    if resource_view and not found.layers and scan.shared:
        path = [scan.shared[key] for key in ("cluster", "block", "subblock") if scan.shared.get(key)]
        found.loose_paths.append(path)
    return found


def _take(scan: _Scan, key: str, value: str, resource_view: bool) -> None:
    found = scan.found
    if key == "instances":
        scan.in_instances = True
    elif key in ("cluster", "block", "subblock", "physicalhost") and value:
        target = scan.shared if resource_view and not scan.in_instances else scan.host
        target[key] = value
    elif key == "zone" and value:
        found.zones.add(value.rsplit("/", 1)[-1])
    elif key == "healthstatus":
        found.health = value
    elif key in ("healthyhostcount", "degradedhostcount", "count"):
        _count(found, key, value)
    elif key == "nextpagetoken" and value:
        found.complete = False
    elif key in _HOST_KEYS and value and (scan.in_instances or not resource_view):
        _name(scan, key, value)


def _count(found: CloudHosts, key: str, value: str) -> None:
    if not value.isdecimal() or len(value) > 9:
        return
    if key == "count":
        found.count = int(value)
    elif key == "healthyhostcount":
        found.healthy_hosts = int(value)
    else:
        found.degraded_hosts = int(value)


def _name(scan: _Scan, key: str, value: str) -> None:
    """A name is better than an id, as people use it; the first of each kind counts."""
    kind = _HOST_KEYS[key]
    if scan.name is None or (scan.name[0] == "instance_id" and kind == "name" and key == "name"):
        scan.name = (kind, value)


READER = Reader(kind="cloud", title=TITLE, confidence=confidence, read=read)
