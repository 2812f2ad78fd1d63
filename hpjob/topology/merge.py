"""Several sources about the same machine, joined: gaps are filled, disagreements are said and not resolved.

The first source that states a fact keeps it; every later one that states another is named in a note.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from hpjob.core.schema import Persisted
from hpjob.topology.model import Gpu, Island, Link, Nic, Node, Topology

RecordT = TypeVar("RecordT", bound=Persisted)
UNNAMED = "this-node"
"""Name that readers give to the node of a text which does not name it."""
_MAX_LISTED = 10


def merge(topologies: Sequence[Topology], *, node_name: str | None = None) -> Topology:
    """Join topologies of the same nodes.

    Args:
        topologies: The most trusted one first; at least one.
        node_name: What the node is called whose texts do not name it.

    Raises:
        ValueError: No topology was given.
    """
    if not topologies:
        raise ValueError("nothing to merge")
    parts = [_named(topology, node_name) for topology in topologies]
    notes: list[str] = [note for part in parts for note in part.notes]
    sources: dict[str, str] = {}
    nodes: dict[str, Node] = {}
    for part in parts:
        for node in part.nodes:
            known = nodes.get(node.name)
            nodes[node.name] = node if known is None else _merge_node(known, node, part.source, notes)
        for fact, source in part.sources.items():
            sources.setdefault(fact, source)
    update: dict[str, Any] = {"nodes": tuple(nodes.values()), "sources": sources}
    for field in ("machine", "switches", "blocks", "aggregated_blocks", "domains"):
        stated = [(part.source, getattr(part, field)) for part in parts if getattr(part, field) is not None]
        update[field] = stated[0][1] if stated else None
        for source, other in stated[1:] if field != "aggregated_blocks" else ():
            notes.extend(_compare_groups(field, stated[0], (source, other)))
    update["source"] = " + ".join(dict.fromkeys(part.source for part in parts))
    update["notes"] = tuple(dict.fromkeys(notes))
    return parts[0].model_copy(update=update)


def _named(topology: Topology, node_name: str | None) -> Topology:
    if node_name is None or all(node.name != UNNAMED for node in topology.nodes):
        return topology
    text = topology.model_copy(
        update={
            "nodes": tuple(
                n.model_copy(update={"name": node_name}) if n.name == UNNAMED else n for n in topology.nodes
            ),
            "sources": {k.replace(f"nodes.{UNNAMED}.", f"nodes.{node_name}."): v for k, v in topology.sources.items()},
        }
    )
    if topology.domains is None:
        return text
    domains = tuple(
        domain.model_copy(update={"nodes": tuple(node_name if n == UNNAMED else n for n in domain.nodes)})
        for domain in topology.domains
    )
    return text.model_copy(update={"domains": domains})


def _merge_node(known: Node, other: Node, source: str, notes: list[str]) -> Node:
    update: dict[str, Any] = {}
    for field in ("cpus", "memory_gib", "nic_bandwidth_gb_s", "state"):
        update[field] = _either(getattr(known, field), getattr(other, field), f"{known.name}: {field}", source, notes)
    update["gpus"] = _merge_gpus(known, other, source, notes)
    update["islands"] = _merge_islands(known, other, source, notes)
    update["links"] = _merge_links(known, other, source, notes)
    update["nics"] = _merge_nics(known, other, source, notes)
    return known.model_copy(update=update)


def _either(first: Any, second: Any, what: str, source: str, notes: list[str]) -> Any:
    if first is None or second is None:
        return second if first is None else first
    same = abs(first - second) <= 0.05 * abs(first) if isinstance(first, float) else first == second
    if not same:
        notes.append(f"{what} is {first}, but {source} says {second}")
    return first


def _merge_records(first: RecordT, second: RecordT, what: str, source: str, notes: list[str]) -> RecordT:
    update = {
        field: _either(getattr(first, field), getattr(second, field), f"{what}: {field}", source, notes)
        for field in type(first).model_fields
    }
    return first.model_copy(update=update)


def _merge_gpus(known: Node, other: Node, source: str, notes: list[str]) -> tuple[Gpu, ...]:
    if not known.gpus or not other.gpus:
        return known.gpus or other.gpus
    if len(known.gpus) != len(other.gpus):
        notes.append(f"{known.name}: {len(known.gpus)} GPUs, but {source} shows {len(other.gpus)}")
    second = {gpu.index: gpu for gpu in other.gpus}
    return tuple(
        _merge_gpu(gpu, second[gpu.index], known.name, source, notes) if gpu.index in second else gpu
        for gpu in known.gpus
    )


def _merge_gpu(first: Gpu, second: Gpu, node: str, source: str, notes: list[str]) -> Gpu:
    """Names of one model are spelled differently by each source, so only gaps are filled."""
    same_model = second.model_copy(update={"model": first.model or second.model, "pci": first.pci or second.pci})
    return _merge_records(first, same_model, f"{node} GPU {first.index}", source, notes)


def _merge_islands(known: Node, other: Node, source: str, notes: list[str]) -> tuple[Island, ...] | None:
    if known.islands is None or other.islands is None:
        return other.islands if known.islands is None else known.islands
    first = {frozenset(island.gpus): island for island in known.islands}
    second = {frozenset(island.gpus): island for island in other.islands}
    if set(first) != set(second):
        notes.append(
            f"{known.name}: islands {[list(i.gpus) for i in known.islands]}, "
            f"but {source} shows {[list(i.gpus) for i in other.islands]}"
        )
        return known.islands
    merged: list[Island] = []
    for gpus, island in first.items():
        twin = second[gpus].model_copy(update={"cliques": island.cliques or second[gpus].cliques, "gpus": island.gpus})
        merged.append(_merge_records(island, twin, f"{known.name} island {list(island.gpus)}", source, notes))
    return tuple(merged)


def _merge_links(known: Node, other: Node, source: str, notes: list[str]) -> tuple[Link, ...] | None:
    if known.links is None or other.links is None:
        return other.links if known.links is None else known.links
    first = {(link.a, link.b): link for link in known.links}
    for link in other.links:
        pair = (link.a, link.b)
        what = f"{known.name} GPUs {link.a}-{link.b}"
        first[pair] = _merge_records(first[pair], link, what, source, notes) if pair in first else link
    return tuple(first[pair] for pair in sorted(first))


def _merge_nics(known: Node, other: Node, source: str, notes: list[str]) -> tuple[Nic, ...] | None:
    if known.nics is None or other.nics is None:
        return other.nics if known.nics is None else known.nics
    first = {nic.name: nic for nic in known.nics}
    for nic in other.nics:
        found = first.get(nic.name)
        if found is None:
            first[nic.name] = nic
            continue
        # A rail read from a switch port outranks a guess, which is then no disagreement.
        guess = nic.rail_from == "nearest NIC" or found.rail_from == "nearest NIC"
        if guess and found.rail_from == "nearest NIC":
            found = found.model_copy(update={"rail": nic.rail, "rail_from": nic.rail_from})
        twin = nic.model_copy(update={"rail_from": found.rail_from or nic.rail_from})
        if guess:
            twin = twin.model_copy(update={"rail": found.rail})
        first[nic.name] = _merge_records(found, twin, f"{known.name} NIC {nic.name}", source, notes)
    return tuple(first.values())


def _compare_groups(field: str, first: tuple[str, Any], second: tuple[str, Any]) -> list[str]:
    """Nodes that two sources put under different leaves, blocks or domains, and nodes that one side lacks."""
    if field == "machine":
        same = first[1].name == second[1].name
        return [] if same else [f"machine is {first[1].name}, but {second[0]} says {second[1].name}"]
    here, there = _partners(first[1]), _partners(second[1])
    both = set(here) & set(there)
    notes: list[str] = []
    missing = sorted(set(here) ^ set(there))
    if missing and both:
        notes.append(f"{field}: only one of {first[0]} and {second[0]} knows {_listed(missing)}")
    apart = sorted(node for node in both if here[node] & both != there[node] & both)
    if apart:
        notes.append(f"{field}: {first[0]} and {second[0]} group {_listed(apart)} with different nodes")
    return notes


def _partners(groups: Any) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for group in groups:
        if getattr(group, "level", 0) == 0:
            members = set(group.nodes)
            for node in group.nodes:
                found[node] = found.get(node, set()) | members
    return found


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + rest
