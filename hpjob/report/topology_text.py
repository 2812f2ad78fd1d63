"""A topology as a tree of plain text: switches, nodes, islands, NICs."""

from __future__ import annotations

from collections.abc import Iterator

from hpjob.core import hostlist
from hpjob.topology.model import Island, Node, Switch, Topology

MAX_NODES = 32
"""Nodes of one switch that are drawn one by one."""


def topology_tree(topology: Topology) -> str:
    """Draw the topology; alike nodes under one switch are folded into a host list."""
    nodes = {node.name: node for node in topology.nodes}
    lines = [f"{len(nodes)} node{'s' if len(nodes) != 1 else ''} ({topology.source})"]
    switches = {switch.name: switch for switch in topology.switches or ()}
    placed: set[str] = set()
    below = {child for switch in switches.values() for child in switch.switches}
    for switch in switches.values():
        if switch.name not in below:
            lines.extend(_switch(switch, switches, nodes, placed, ""))
    blocks = {block.name: block.nodes for block in topology.blocks or ()}
    for name, members in blocks.items():
        known = [nodes[member] for member in members if member in nodes]
        lines.append(f"block {name}: {len(members)} nodes")
        if not switches:
            lines.extend(_nodes(known, "  "))
            placed.update(members)
    lines.extend(f"larger block {block.name}: {len(block.nodes)} nodes" for block in topology.aggregated_blocks or ())
    lines.extend(f"NVLink domain {domain.name}: {hostlist.fold(domain.nodes)}" for domain in topology.domains or ())
    lines.extend(_nodes([node for node in nodes.values() if node.name not in placed], ""))
    return "\n".join(lines)


def _switch(
    switch: Switch, switches: dict[str, Switch], nodes: dict[str, Node], placed: set[str], indent: str
) -> Iterator[str]:
    kind = "leaf" if switch.level == 0 else f"level {switch.level}"
    yield f"{indent}{kind} {switch.name}"
    if len(indent) > 40:
        return
    for child in switch.switches:
        if child in switches and f"switch:{child}" not in placed:
            placed.add(f"switch:{child}")
            yield from _switch(switches[child], switches, nodes, placed, indent + "  ")
        elif child in switches:
            yield f"{indent}  (also) {child}"
    if not switch.switches:
        known = [nodes[name] for name in switch.nodes if name in nodes]
        placed.update(switch.nodes)
        yield from _nodes(known, indent + "  ")


def _nodes(found: list[Node], indent: str) -> Iterator[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for node in found:
        groups.setdefault((_summary(node), "\n".join(_inside(node))), []).append(node.name)
    for (summary, inside), names in groups.items():
        title = names[0] if len(names) == 1 else f"{hostlist.fold(names)} ({len(names)} nodes)"
        yield f"{indent}{title}{summary}"
        if inside:
            yield from (f"{indent}  {line}" for line in inside.split("\n"))


def _summary(node: Node) -> str:
    parts = []
    if node.gpus:
        model = node.gpus[0].model
        parts.append(f"{len(node.gpus)} x {model}" if model else f"{len(node.gpus)} GPUs")
    if node.cpus:
        parts.append(f"{node.cpus} CPUs")
    if node.memory_gib:
        parts.append(f"{node.memory_gib:.0f} GiB")
    if node.state:
        parts.append(node.state)
    return ": " + ", ".join(parts) if parts else ""


def _inside(node: Node) -> list[str]:
    lines = [_island(island) for island in node.islands or ()]
    if node.islands is None and len(node.gpus) > 1:
        lines.append("NVLink or XGMI: not seen")
    elif node.islands == () and len(node.gpus) > 1:
        lines.append("no NVLink or XGMI between the GPUs")
    inside = {gpu for island in node.islands or () for gpu in island.gpus}
    unsure = {gpu for link in node.links or () if link.linked is None for gpu in (link.a, link.b)}
    if alone := tuple(gpu.index for gpu in node.gpus if inside and gpu.index not in inside | unsure):
        lines.append(f"GPU {_indices(alone)} has no link to the others")
    for gpu in node.gpus:
        if gpu.mig:
            lines.append(f"GPU {gpu.index} is sliced: {', '.join(gpu.mig)}")
        if gpu.display:
            lines.append(f"GPU {gpu.index} is a display card")
    for nic in node.nics or ():
        near = "" if not nic.near_gpus else f" near GPU {_indices(nic.near_gpus)}"
        rail = "" if nic.rail is None else f", rail {nic.rail} ({nic.rail_from})"
        state = "" if nic.active is None else (", active" if nic.active else ", down")
        leaf = "" if nic.leaf is None else f", leaf {nic.leaf}"
        lines.append(f"NIC {nic.name}{near}{state}{leaf}{rail}")
    return lines


def _island(island: Island) -> str:
    shape = {True: "all-to-all", False: "not all-to-all", None: "pairs not all seen"}[island.all_to_all]
    cliques = "".join(f"; all-to-all {_indices(clique)}" for clique in island.cliques[:4])
    return f"{island.kind} island {_indices(island.gpus)}: {shape}{cliques}"


def _indices(gpus: tuple[int, ...]) -> str:
    """Fold 0,1,2,5 into 0-2,5."""
    spans: list[list[int]] = []
    for gpu in sorted(gpus):
        if spans and gpu == spans[-1][1] + 1:
            spans[-1][1] = gpu
        else:
            spans.append([gpu, gpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
