"""Slurm's own topology: ``scontrol show topology``, topology.conf, topology.yaml, pyslurm, SLURM_TOPOLOGY_ADDR."""

from __future__ import annotations

import re
from collections import Counter

from hpjob.topology.read.reading import Facts, Reader, Reading
from hpjob.topology.read.slurm_addr import looks_like_addr, read_addr
from hpjob.topology.read.slurm_canonical import TITLE, Expander, heights, slurm_topology, whole_children
from hpjob.topology.read.slurm_records import Record, Records, line_records, pyslurm_records, relevant_lines
from hpjob.topology.read.slurm_yaml import YamlTopologies, looks_like_yaml, yaml_topologies
from hpjob.topology.read.text import Source

MAX_RING = 16
_GUID_NODES = re.compile(r"SwitchName=\S+\s+Nodes=0x[0-9a-f]{12,16}(?:[,\s]|$)", re.I)
_PYSLURM_MARK = re.compile(r"['\"]link_speed['\"]")
_MARKS = ("switchname=", "blockname=", "ringname=", "torusname=", "aggregatedblock=", "blocksizes=")
_NO_TOPOLOGY = "no topology information available"
_PLUGIN_LINE = re.compile(r"TopologyPlugin\s*=\s*topology/(\w+)")


def confidence(source: Source) -> float:
    """High when records of switches, blocks, rings or an address are there."""
    text = source.text
    lower = source.lower
    if "SwitchName=" in text and _GUID_NODES.search(text):
        return 0.3
    if has_records(source) or looks_like_addr(text) or looks_like_yaml(text):
        return 0.93
    if "link_speed" in text and "switches" in text and _PYSLURM_MARK.search(text):
        return 0.9
    return 0.8 if _NO_TOPOLOGY in lower else (0.6 if "topologyplugin" in lower and _PLUGIN_LINE.search(text) else 0.0)


def has_records(source: Source) -> bool:
    """Whether a record or a line of block sizes is there."""
    return any(mark in source.lower for mark in _MARKS)


def read(source: Source) -> Reading:
    """Read whichever form the text has."""
    text = source.text
    records_there = has_records(source)
    if looks_like_addr(text) and not records_there:
        return read_addr(text)
    yaml_file = None
    if not records_there and looks_like_yaml(text):
        yaml_file = yaml_topologies(text)
        records = yaml_file.records
    elif not records_there and _PYSLURM_MARK.search(text):
        records = pyslurm_records(text)
    else:
        records = line_records(relevant_lines(source.lines))
    return _reading(records, yaml_file, text)


def _reading(records: Records, yaml_file: YamlTopologies | None, text: str) -> Reading:
    expand = Expander()
    by_kind = _by_kind(records)
    notes: list[str] = []
    snapshots, blocks = _last_snapshot(records)
    by_kind["block"], by_kind["aggregated"] = blocks
    printed = any(record.level is not None for record in by_kind["switch"])
    facts: Facts = {"plugin": _plugin(by_kind, yaml_file, text)}
    facts |= _tree_facts(by_kind["switch"], printed, expand)
    facts["nodes"] = _count_nodes(by_kind, expand)
    facts |= _block_facts(by_kind, records, yaml_file, expand)
    facts["original_names"] = records.original_names or {}
    facts |= _ring_facts(by_kind, yaml_file, expand)
    facts["topologies"] = _topologies(records, yaml_file, expand)
    facts["snapshots"] = snapshots
    facts["valid"] = not _violations(facts, printed, yaml_file, notes)
    facts |= dict.fromkeys(("addr", "levels", "top_switches", "leaf", "node"))
    if records.names_cut or any(record.cut for record in records.items):
        notes.append("the text ends inside a record; what it lacks is not seen")
    if yaml_file is not None and not yaml_file.whole:
        notes.append("the YAML is damaged; only what still loads was read")
    topology = slurm_topology(by_kind, expand, notes, is_flat=facts["plugin"] == "flat")
    return Reading(kind="slurm", facts=facts, topology=topology, notes=tuple(notes))


def _by_kind(records: Records) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {"switch": [], "ring": [], "torus": [], "block": [], "aggregated": []}
    last: dict[tuple[str, str, str | None], int] = {}
    for record in records.items:
        key = (record.kind, record.name, record.topology)
        group = found[record.kind]
        if record.kind in ("switch", "ring", "torus") and key in last:
            group[last[key]] = record
            continue
        last[key] = len(group)
        group.append(record)
    return found


def _last_snapshot(records: Records) -> tuple[int, tuple[list[Record], list[Record]]]:
    """A block name that comes again begins a new listing; the last one is what holds now."""
    snapshots = 1
    blocks: list[Record] = []
    aggregated: list[Record] = []
    seen: set[tuple[str, str | None]] = set()
    for record in records.items:
        if record.kind == "block":
            key = (record.name, record.topology)
            if key in seen:
                snapshots += 1
                seen, blocks, aggregated = set(), [], []
            seen.add(key)
            blocks.append(record)
        elif record.kind == "aggregated":
            aggregated.append(record)
    return snapshots, (blocks, aggregated)


def _plugin(by_kind: dict[str, list[Record]], yaml_file: YamlTopologies | None, text: str) -> str | None:
    if yaml_file is not None:
        names = [*yaml_file.defaults, *yaml_file.plugins]
        return yaml_file.plugins[names[0]] if names else None
    for kind, plugin in (("switch", "tree"), ("block", "block"), ("ring", "ring"), ("torus", "torus3d")):
        if by_kind[kind]:
            return plugin
    named = _PLUGIN_LINE.search(text)
    if named:
        return {"none": "flat", "default": "flat", "3d_torus": "torus3d"}.get(named[1], named[1])
    if re.search(r"BlockSizes=", text, re.I):
        return "block"
    return "flat" if _NO_TOPOLOGY in text.lower() else None


def _tree_facts(switches: list[Record], printed: bool, expand: Expander) -> Facts:
    names = (
        "switches",
        "switches_by_level",
        "roots",
        "children_of_switch",
        "undefined_children",
        "nodes_per_leaf",
        "link_speed",
    )
    if not switches:
        return dict.fromkeys(names)
    defined = {record.name for record in switches}
    children = {record.name: expand(record.children) for record in switches}
    levels = {r.name: r.level for r in switches} if printed else heights({n: c or [] for n, c in children.items()})
    named = {child for record in switches for child in whole_children(record, children[record.name])}
    counts = Counter(level for level in levels.values() if level is not None)
    parents = [r for r in switches if r.children is not None or (r.cut and (r.level or 0) > 0)]
    leaves = [r for r in switches if levels[r.name] == 0 and (r.nodes is not None or r.cut)]
    speeds = {record.name: record.link_speed for record in switches if record.link_speed is not None}
    return {
        "switches": len(switches),
        "switches_by_level": {str(level): counts[level] for level in sorted(counts)},
        "roots": [record.name for record in switches if record.name not in named],
        "children_of_switch": {r.name: None if (c := children[r.name]) is None or r.cut else len(c) for r in parents},
        "undefined_children": sorted(named - defined),
        "nodes_per_leaf": {r.name: None if (n := expand(r.nodes)) is None else len(n) for r in leaves},
        "link_speed": speeds or None,
    }


def _count_nodes(by_kind: dict[str, list[Record]], expand: Expander) -> int | None:
    seen: set[str] = set()
    for group in by_kind.values():
        whole = {record.nodes for record in group if record.nodes is not None and not record.cut}
        for text in whole:
            seen.update(expand(text) or ())
        for record in group:
            if record.cut:
                seen.update((expand(record.nodes) or ())[:-1])
    return len(seen) or None


def _size(record: Record, expand: Expander) -> int | None:
    names = None if record.cut else expand(record.nodes)
    return None if names is None else len(names)


def _block_facts(
    by_kind: dict[str, list[Record]], records: Records, yaml_file: YamlTopologies | None, expand: Expander
) -> Facts:
    blocks = by_kind["block"]
    sizes = records.block_sizes
    if yaml_file is not None:
        sizes = next(
            (yaml_file.sizes[name] for name in [*yaml_file.defaults, *yaml_file.sizes] if name in yaml_file.sizes), None
        )
    printed = [record.size for record in blocks if record.size is not None]
    return {
        "blocks": {record.name: _size(record, expand) for record in blocks} if blocks else None,
        "block_size": printed[0] if printed else None,
        "block_sizes": sizes,
        "aggregated": {r.name: _size(r, expand) for r in by_kind["aggregated"]} if blocks else None,
    }


def _ring_facts(by_kind: dict[str, list[Record]], yaml_file: YamlTopologies | None, expand: Expander) -> Facts:
    torus = {}
    for record in by_kind["torus"]:
        shape = yaml_file.toruses.get(record.name) if yaml_file else None
        dims = shape.dims if shape else [None, None, None]
        whole = [dim for dim in dims if dim is not None]
        cells = whole[0] * whole[1] * whole[2] if len(whole) == 3 else None
        places = shape.placements if shape else []
        torus[record.name] = {"dims": dims, "cells": cells, "nodes": _size(record, expand), "placements": places}
    rings = {record.name: _size(record, expand) for record in by_kind["ring"]}
    return {"rings": rings or None, "torus": torus or None}


def _topologies(records: Records, yaml_file: YamlTopologies | None, expand: Expander) -> Facts | None:
    if yaml_file is None:
        return None
    default = yaml_file.defaults[0] if yaml_file.defaults else None
    found: Facts = {}
    for name, plugin in yaml_file.plugins.items():
        nodes = {n for r in records.items if r.topology == name for n in expand(r.nodes) or ()}
        found[name] = {"plugin": plugin, "default": name == default, "nodes": len(nodes) or None}
    return found


def _violations(facts: Facts, printed: bool, yaml_file: YamlTopologies | None, notes: list[str]) -> list[str]:
    broken: list[str] = []
    if facts["undefined_children"] and not printed:
        broken.append(f"children without a record: {', '.join(facts['undefined_children'][:10])}")
    for sizes in [facts["block_sizes"] or [], *(yaml_file.sizes.values() if yaml_file else [])]:
        base = sizes[0] if sizes else 1
        odd = [size for size in sizes if base < 1 or size % base or (size // base) & (size // base - 1) or size < base]
        if odd:
            broken.append(f"block sizes that are not {base} times a power of two: {odd}")
    broken += [f"{place} is no list" for place in (yaml_file.malformed if yaml_file else [])]
    for name, torus in (facts["torus"] or {}).items():
        if torus["cells"] is not None and torus["nodes"] is not None and torus["cells"] != torus["nodes"]:
            broken.append(f"torus {name} has {torus['cells']} cells and {torus['nodes']} nodes")
    for name, size in (facts["rings"] or {}).items():
        if size is not None and size > MAX_RING:
            broken.append(f"ring {name} has {size} nodes, more than {MAX_RING}")
    notes.extend(dict.fromkeys(broken))
    return broken


READER = Reader(kind="slurm", title=TITLE, confidence=confidence, read=read)
