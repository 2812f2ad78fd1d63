"""AWS: the reply of DescribeInstanceTopology (JSON or YAML), and the topology labels of EKS nodes."""

from __future__ import annotations

import re
from typing import Any

from hpjob.topology.read.cloud_facts import CloudHosts, cloud_reading, is_elided
from hpjob.topology.read.reading import Reader, Reading
from hpjob.topology.read.structured import load_json, load_yaml, walk
from hpjob.topology.read.text import Source

TITLE = "AWS instance topology"
_LABEL = re.compile(r"network-node-layer-([0-9])[\"']?\s*[:=]\s*[\"']?([A-Za-z0-9][\w.-]*)")
_NAME = re.compile(r"(?:^|[\s,{\"'])(?:kubernetes\.io/hostname|Name|name)[\"']?\s*[:=]\s*[\"']?([\w.-]+)")
_ZONE = re.compile(r"topology\.kubernetes\.io/zone[\"']?\s*[:=]\s*[\"']?([\w-]+)")
_NULLS = ("", "null", "none", "None", "N/A")


def confidence(source: Source) -> float:
    """High when network nodes or their labels are there."""
    if "NetworkNodes" in source.text:
        return 0.95
    return 0.93 if "network-node-layer-" in source.text.lower() else 0.0


def read(source: Source) -> Reading:
    """Read the reply, else the labels."""
    text = source.text
    if "NetworkNodes" in text:
        return cloud_reading(_instances(text), TITLE)
    return cloud_reading(_labels(source), TITLE)


def _instances(text: str) -> CloudHosts:
    found = CloudHosts("aws", "instance_id", complete=not is_elided(text))
    loaded = load_json(text)
    if loaded is None:
        loaded = (load_yaml(text), True)
    document, whole = loaded
    found.complete &= whole
    for entry in walk(document):
        if entry.get("NextToken") not in (None, *_NULLS):
            found.complete = False
        layers = entry.get("NetworkNodes")
        if isinstance(layers, list):
            _instance(entry, [str(layer) for layer in layers if isinstance(layer, str)], found)
    return found


def _instance(entry: dict[str, Any], layers: list[str], found: CloudHosts) -> None:
    zone = entry.get("AvailabilityZone") or entry.get("ZoneId")
    if isinstance(zone, str):
        found.zones.add(zone)
    host = entry.get("InstanceId")
    if not isinstance(host, str):
        found.loose_paths.append(layers)
        return
    found.layers[host] = layers
    block = entry.get("CapacityBlockId")
    if isinstance(block, str) and block not in _NULLS:
        found.domains.setdefault(block, []).append(host)


def _labels(source: Source) -> CloudHosts:
    """Labels of Kubernetes nodes: manifests, ``--show-labels`` lines, or a table with a column for each layer."""
    found = CloudHosts("aws", "name", complete=not is_elided(source.text))
    if _table(source, found):
        return found
    name: str | None = None
    layers: dict[int, str] = {}
    for line in source.lines:
        if len(line) > 20_000:
            continue
        labels = _LABEL.findall(line)
        found.zones.update(_ZONE.findall(line))
        named = _NAME.search(line)
        if len(labels) > 1:
            first = line.split()[0] if line.split() else ""
            host = named[1] if named else (first if "=" not in first and ":" not in first else None)
            _add(found, host, {int(level): value for level, value in labels})
            continue
        if named and not labels:
            if layers and name is not None and named[1] != name:
                _add(found, name, layers)
                layers, name = {}, None
            name = name or named[1]
        for level, value in labels:
            if int(level) in layers:
                _add(found, name, layers)
                layers, name = {}, None
            layers[int(level)] = value
    if layers:
        _add(found, name, layers)
    return found


def _add(found: CloudHosts, host: str | None, layers: dict[int, str]) -> None:
    path = [layers[level] for level in sorted(layers)]
    if host is None:
        found.loose_paths.append(path)
    else:
        found.layers[host] = path


def _table(source: Source, found: CloudHosts) -> bool:
    columns: list[str] = []
    for line in source.lines:
        words = line.split() if len(line) < 5000 else []
        if any(word.upper().startswith("NETWORK-NODE-LAYER-") for word in words) and words[0].upper() == "NAME":
            columns = [word.upper() for word in words]
        elif columns and len(words) == len(columns):
            row = dict(zip(columns, words, strict=True))
            layers = {int(key[-1]): value for key, value in row.items() if key.startswith("NETWORK-NODE-LAYER-")}
            _add(found, row["NAME"], layers)
    return bool(columns)


READER = Reader(kind="cloud", title=TITLE, confidence=confidence, read=read)
