"""What the four cloud readers have in common: hosts with the layers above them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpjob.topology.model import Node, NvlinkDomain, Switch, Topology
from hpjob.topology.read.reading import Facts, Reading

Provider = Literal["aws", "gcp", "oci", "azure"]
_ELISIONS = ("...", "…")


@dataclass
class CloudHosts:
    """Hosts of one listing; layers go from the top to the one next to the host."""

    provider: Provider
    node_id: str | None
    layers: dict[str, list[str]] = field(default_factory=dict)
    loose_paths: list[list[str]] = field(default_factory=list)
    """Paths of hosts that the text does not name."""
    domains: dict[str, list[str]] = field(default_factory=dict)
    zones: set[str] = field(default_factory=set)
    count: int | None = None
    complete: bool = True
    countable: bool = True
    health: str | None = None
    healthy_hosts: int | None = None
    degraded_hosts: int | None = None
    gpus_per_node: int | None = None
    planes: int | None = None


def is_elided(text: str) -> bool:
    """Whether a line of the text only stands for others that were left out."""
    return any(line.strip(" \t,-#/").startswith(_ELISIONS) for line in text.split("\n") if ".." in line or "…" in line)


def cloud_reading(found: CloudHosts, title: str, notes: tuple[str, ...] = ()) -> Reading:
    """Turn hosts into facts and a tree."""
    paths: dict[tuple[str, ...], list[str]] = {}
    for host, layers in found.layers.items():
        paths.setdefault(tuple(layers), []).append(host)
    for layers in found.loose_paths:
        paths.setdefault(tuple(layers), [])
    short = found.count is not None and found.count > len(found.layers)
    facts: Facts = {
        "provider": found.provider,
        "nodes": len(found.layers) if found.countable else None,
        "node_id": found.node_id if found.layers else None,
        "layers_top_to_bottom": found.layers,
        "paths": [list(path) for path in paths if path],
        "same_leaf": [hosts for path, hosts in paths.items() if len(hosts) > 1 and path],
        "accelerator_domains": found.domains,
        "complete": found.complete and not short,
        "count": found.count,
        "zones": len(found.zones) or None,
        "health": found.health,
        "healthy_hosts": found.healthy_hosts,
        "degraded_hosts": found.degraded_hosts,
        "gpus_per_node": found.gpus_per_node,
        "planes": found.planes,
    }
    if not facts["complete"]:
        notes = (*notes, "the listing is not complete")
    return Reading(kind="cloud", facts=facts, topology=_topology(found, title, notes), notes=notes)


def _topology(found: CloudHosts, title: str, notes: tuple[str, ...]) -> Topology | None:
    if not found.layers or not found.countable:
        return None
    depth = max(len(layers) for layers in found.layers.values())
    below: dict[tuple[str, ...], dict[str, None]] = {}
    for host, layers in found.layers.items():
        for at in range(len(layers)):
            child = "/".join(layers[: at + 2]) if at + 1 < len(layers) else host
            below.setdefault(tuple(layers[: at + 1]), {})[child] = None
    switches = [
        Switch(
            name="/".join(path),
            level=max(0, depth - len(path)),
            nodes=tuple(members) if len(path) == depth else (),
            switches=tuple(members) if len(path) < depth else (),
        )
        for path, members in below.items()
    ]
    domains = tuple(NvlinkDomain(name=name, nodes=tuple(hosts)) for name, hosts in found.domains.items())
    return Topology(
        nodes=tuple(Node(name=host) for host in found.layers),
        switches=tuple(switches),
        domains=domains or None,
        source=title,
        notes=notes,
        sources={"switches": title} | ({"domains": title} if domains else {}),
    )
