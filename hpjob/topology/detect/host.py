"""The host itself: cores, memory, NUMA nodes, from psutil and sysfs."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from hpjob.topology.model import Node, Topology

SYSFS = Path("/sys")


def host_name() -> str:
    """Name of this node: Slurm's own name for it inside a job, else the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def read_small(path: Path) -> str | None:
    """Content of a sysfs file without its line end; None = not there or not readable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def numa_of_pci(busid: str, sysfs: Path = SYSFS) -> int | None:
    """NUMA node of a PCI device; None = not known (a kernel that does not know says -1)."""
    text = read_small(sysfs / "bus/pci/devices" / short_busid(busid) / "numa_node")
    return int(text) if text is not None and text.isdecimal() else None


def short_busid(busid: str) -> str:
    """Turn ``00000000:00:06.0`` into sysfs' ``0000:00:06.0``; a domain behind a VMD has five digits."""
    domain, _, rest = busid.lower().partition(":")
    return f"{domain.lstrip('0').zfill(4)}:{rest}"


def numa_nodes(sysfs: Path = SYSFS) -> list[int]:
    """NUMA nodes that the kernel knows."""
    found = [path.name[4:] for path in (sysfs / "devices/system/node").glob("node[0-9]*")]
    return sorted(int(name) for name in found if name.isdecimal())


def host_topology(name: str) -> Topology:
    """Cores and memory of this host as a topology of one node."""
    # psutil is imported late: it costs time that reading a pasted text need not pay.
    import psutil  # noqa: PLC0415

    memory_gib = psutil.virtual_memory().total / 2**30
    node = Node(name=name, cpus=psutil.cpu_count(), memory_gib=round(memory_gib, 2))
    count = len(numa_nodes())
    notes = () if count else ("NUMA nodes are not known: the kernel shows none in /sys/devices/system/node",)
    sources = {f"nodes.{name}.cpus": "psutil", f"nodes.{name}.memory_gib": "psutil"}
    return Topology(nodes=(node,), source="host", notes=notes, sources=sources)
