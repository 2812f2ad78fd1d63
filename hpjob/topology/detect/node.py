"""Everything that this node can tell about itself, from the most trusted source down."""

from __future__ import annotations

from hpjob.topology.detect.commands import NODE_TOOLS, ask
from hpjob.topology.detect.host import host_name, host_topology
from hpjob.topology.detect.infiniband import infiniband_topology
from hpjob.topology.detect.nvml import nvml_topology
from hpjob.topology.merge import merge
from hpjob.topology.model import Nic, Node, Topology


def detect_node(name: str | None = None) -> Topology:
    """Detect this node: NVML and sysfs first, commands as a fallback and a cross-check.

    Works without GPU, driver, InfiniBand and Slurm; ``notes`` say what was not found and why, and where
    two sources disagree.
    """
    name = name or host_name()
    parts: list[Topology] = []
    missing: list[str] = []
    nvml = nvml_topology(name)
    if nvml is not None:
        parts.append(nvml)
    fabric = infiniband_topology(name)
    parts.append(fabric.model_copy(update={"notes": ()}))
    missing.extend(fabric.notes)
    for tool in NODE_TOOLS:
        found, reason = ask(tool)
        if found is not None:
            parts.append(found)
        elif reason and "not on the PATH" not in reason:
            missing.append(reason)
    if not any(node.gpus for part in parts for node in part.nodes):
        missing.insert(0, "no GPU found: no NVIDIA driver answers NVML, and neither nvidia-smi nor rocm-smi shows one")
    parts.append(host_topology(name))
    found = merge(parts, node_name=name)
    nodes = tuple(_guess_rails(node) for node in found.nodes)
    return found.model_copy(update={"nodes": nodes, "notes": (*missing, *found.notes)})


def _guess_rails(node: Node) -> Node:
    """Rail k where a NIC is the only nearest one of GPU k; marked as the guess that it is."""
    if node.nics is None:
        return node
    nearest: dict[int, list[str]] = {}
    for nic in node.nics:
        for gpu in nic.near_gpus or ():
            nearest.setdefault(gpu, []).append(nic.name)
    unique = {names[0]: gpu for gpu, names in nearest.items() if len(names) == 1}
    return node.model_copy(update={"nics": tuple(_with_rail(nic, unique) for nic in node.nics)})


def _with_rail(nic: Nic, unique: dict[str, int]) -> Nic:
    if nic.rail is not None or nic.name not in unique or len(nic.near_gpus or ()) != 1:
        return nic
    return nic.model_copy(update={"rail": unique[nic.name], "rail_from": "nearest NIC"})
