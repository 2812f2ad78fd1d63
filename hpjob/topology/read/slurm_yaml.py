"""Slurm's topology.yaml: several named topologies of different plugins."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from hpjob.topology.read.slurm_records import Record, RecordKind, Records

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_START = re.compile(r"^[ \t]*(?:-[ \t]*)?topology[ \t]*:", re.M)
_PLUGINS = ("tree", "block", "flat", "ring", "torus3d")
_LISTS: dict[str, tuple[str, RecordKind, tuple[str, ...]]] = {
    "tree": ("switches", "switch", ("switch", "name")),
    "block": ("blocks", "block", ("block", "name")),
    "ring": ("rings", "ring", ("ring", "name")),
    "torus3d": ("toruses", "torus", ("torus", "name")),
}
MAX_YAML = 20_000_000


@dataclass
class Torus:
    """A torus with the placements that it allows."""

    dims: list[int | None]
    placements: list[list[int | None]]


@dataclass
class YamlTopologies:
    """What a topology.yaml holds."""

    plugins: dict[str, str | None] = field(default_factory=dict)
    """Topology -> plugin."""
    defaults: list[str] = field(default_factory=list)
    records: Records = field(default_factory=lambda: Records([], original_names={}))
    toruses: dict[str, Torus] = field(default_factory=dict)
    sizes: dict[str, list[int]] = field(default_factory=dict)
    malformed: list[str] = field(default_factory=list)
    """What is no list where Slurm wants one."""
    whole: bool = True


def looks_like_yaml(text: str) -> bool:
    """Whether a topology entry of the file is there."""
    return "topology" in text and bool(_START.search(text)) and any(f"{plugin}:" in text for plugin in _PLUGINS)


def yaml_topologies(text: str) -> YamlTopologies:
    """Read the file; a damaged one is cut back to the entries that still load."""
    found = YamlTopologies()
    document = _load(text, found)
    entries = document if isinstance(document, list) else [document]
    for entry in entries:
        if isinstance(entry, dict) and "topology" in entry:
            _read_entry(entry, found)
    return found


def _load(text: str, found: YamlTopologies) -> Any:
    """Load from the first entry on, giving up lines from the end until it parses (at most a few times)."""
    start = _START.search(text)
    body = text[start.start() if start else 0 :][:MAX_YAML]
    lines = body.split("\n")
    step = 1
    for _ in range(24):
        body = "\n".join(lines)
        try:
            if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(body, Loader=_Loader)):
                found.whole = False
                return None
            return yaml.load(body, Loader=_Loader)
        except (yaml.YAMLError, ValueError, RecursionError):
            found.whole = False
            lines = lines[:-step]
            step *= 2
        if not lines:
            break
    return None


def _read_entry(entry: dict[Any, Any], found: YamlTopologies) -> None:
    name = str(entry["topology"])
    plugin = next((plugin for plugin in _PLUGINS if plugin in entry), None)
    found.plugins[name] = plugin
    if entry.get("cluster_default") is True:
        found.defaults.append(name)
    body = entry.get(plugin) if plugin else None
    if plugin is None or not isinstance(body, dict):
        return
    sizes = body.get("block_sizes")
    if isinstance(sizes, (list, int)):
        found.sizes[name] = [
            int(size) for size in (sizes if isinstance(sizes, list) else [sizes]) if isinstance(size, int)
        ]
    if plugin in _LISTS:
        key, kind, names = _LISTS[plugin]
        items = body.get(key)
        if items is not None and not isinstance(items, (list, dict)):
            found.malformed.append(f"{name}.{plugin}.{key}")
        for item in _dicts(items):
            _read_item(item, kind, names, name, found)


def _dicts(items: Any) -> Iterator[dict[Any, Any]]:
    for item in items if isinstance(items, list) else [items]:
        if isinstance(item, dict):
            yield item


def _read_item(
    item: dict[Any, Any], kind: RecordKind, names: tuple[str, ...], topology: str, found: YamlTopologies
) -> None:
    name = next((str(item[key]) for key in names if key in item), None)
    if name is None:
        return
    record = Record(kind, name, topology=topology, nodes=_text(item.get("nodes")), children=_text(item.get("children")))
    speed = item.get("link_speed")
    record.link_speed = speed if isinstance(speed, int) else None
    found.records.items.append(record)
    if kind == "torus":
        placements = [_dims(placement.get("dims", placement)) for placement in _dicts(item.get("placements"))]
        found.toruses[name] = Torus(_dims(item.get("dims")), placements)


def _text(value: Any) -> str | None:
    if isinstance(value, list):
        return ",".join(str(part) for part in value)
    return None if value is None else str(value)


def _dims(value: Any) -> list[int | None]:
    if isinstance(value, list):
        return [part if isinstance(part, int) else None for part in value[:3]]
    if not isinstance(value, dict):
        return [None, None, None]
    return [value.get(axis) if isinstance(value.get(axis), int) else None for axis in ("x", "y", "z")]
