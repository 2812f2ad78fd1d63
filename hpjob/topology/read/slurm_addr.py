"""SLURM_TOPOLOGY_ADDR: the path from the top switch (or the block) down to one node, as slurmd sets it in a job."""

from __future__ import annotations

import re

from hpjob.topology.model import Block, Node, Switch, Topology
from hpjob.topology.read.reading import Facts, Reading
from hpjob.topology.read.slurm_hostlist import expand_hosts

TITLE = "SLURM_TOPOLOGY_ADDR"
_ADDR = re.compile(r"SLURM_TOPOLOGY_ADDR\s*[=:]\s*[\"']?([^\s\"']+)")
_PATTERN = re.compile(r"SLURM_TOPOLOGY_ADDR_PATTERN\s*[=:]\s*[\"']?([a-z0-9_.]+)")
_TREE_FIELDS = (
    "plugin", "switches", "switches_by_level", "roots", "children_of_switch", "undefined_children", "nodes",
    "nodes_per_leaf", "link_speed", "blocks", "block_size", "block_sizes", "aggregated", "original_names", "rings",
    "torus", "topologies", "snapshots", "valid",
)  # fmt: skip


def looks_like_addr(text: str) -> bool:
    """Whether the variable is set in this text."""
    return "SLURM_TOPOLOGY_ADDR" in text and bool(_ADDR.search(text))


def split_addr(addr: str, levels: list[str] | None) -> list[str]:
    """Split at the dots outside brackets; node names may hold dots, so the last part takes the rest."""
    parts: list[str] = [""]
    depth = 0
    for char in addr:
        depth += (char == "[") - (char == "]")
        if char == "." and depth <= 0 and (levels is None or len(parts) < len(levels)):
            parts.append("")
        else:
            parts[-1] += char
    return parts


def read_addr(text: str) -> Reading:
    """Read the first address; further ones (one per node of a job) go into the topology too."""
    patterns = [match[1].split(".") for match in _PATTERN.finditer(text)]
    addresses = [match[1] for match in _ADDR.finditer(text)]
    levels = patterns[0] if patterns else None
    parts = split_addr(addresses[0], levels)
    switches = _switch_parts(parts, levels)
    facts: Facts = dict.fromkeys(_TREE_FIELDS)
    facts |= {
        "addr": parts,
        "levels": levels,
        "top_switches": (expand_hosts(switches[0]) or []) if switches else [],
        "leaf": switches[-1] if switches else None,
        "node": parts[-1] if levels is None or levels[-1:] == ["node"] else None,
    }
    return Reading(kind="slurm", facts=facts, topology=_topology(addresses, levels))


def _switch_parts(parts: list[str], levels: list[str] | None) -> list[str]:
    if levels is None:
        return [part for part in parts[:-1] if part]
    return [part for part, level in zip(parts, levels, strict=False) if level == "switch" and part]


def _topology(addresses: list[str], levels: list[str] | None) -> Topology:
    nodes: dict[str, None] = {}
    leaves: dict[str, list[str]] = {}
    blocks: dict[str, list[str]] = {}
    above: dict[str, tuple[int, set[str]]] = {}
    for addr in addresses:
        parts = split_addr(addr, levels)
        nodes[parts[-1]] = None
        switches = _switch_parts(parts, levels)
        if switches:
            leaves.setdefault(switches[-1], []).append(parts[-1])
        for height, (lower, upper) in enumerate(zip(switches[::-1], switches[-2::-1], strict=False), start=1):
            for name in expand_hosts(upper) or [upper]:
                above.setdefault(name, (height, set()))[1].update(expand_hosts(lower) or [lower])
        for part, level in zip(parts, levels or [], strict=False):
            if level == "block" and part:
                blocks.setdefault(part, []).append(parts[-1])
    found = [Switch(name=name, level=0, nodes=tuple(members)) for name, members in leaves.items()]
    found += [Switch(name=name, level=h, switches=tuple(sorted(below))) for name, (h, below) in above.items()]
    return Topology(
        nodes=tuple(Node(name=name) for name in nodes),
        switches=tuple(found) if found else None,
        blocks=tuple(Block(name=name, nodes=tuple(members)) for name, members in blocks.items()) or None,
        source=TITLE,
        sources={"switches": TITLE} if found else {},
    )
