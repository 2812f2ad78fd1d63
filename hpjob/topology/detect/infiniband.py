"""RDMA devices of this host from ``/sys/class/infiniband``."""

from __future__ import annotations

from pathlib import Path

from hpjob.topology.detect.host import SYSFS, read_small
from hpjob.topology.model import Nic, Node, Topology
from hpjob.topology.read.text import by_number

SOURCE = "/sys/class/infiniband"


def infiniband_topology(name: str, sysfs: Path = SYSFS) -> Topology:
    """NICs of this host; none found is said, with the reason."""
    folder = sysfs / "class/infiniband"
    devices = by_number([path.name for path in folder.iterdir()]) if folder.is_dir() else []
    if not folder.is_dir():
        reason = "no RDMA driver is loaded: /sys/class/infiniband is missing"
    else:
        reason = "" if devices else "no RDMA device in /sys/class/infiniband"
    nics = tuple(_nic(folder / device) for device in devices)
    return Topology(
        nodes=(Node(name=name, nics=nics if folder.is_dir() else None),),
        source=SOURCE,
        notes=(f"no InfiniBand or RoCE found: {reason}",) if reason else (),
        sources={f"nodes.{name}.nics": SOURCE} if nics else {},
    )


def _nic(device: Path) -> Nic:
    port = next(iter(sorted((device / "ports").glob("[0-9]*"), key=lambda path: int(path.name))), None)
    state = read_small(port / "state") if port else None
    rate = (read_small(port / "rate") if port else None) or ""
    number = rate.split(" ", 1)[0]
    numa = read_small(device / "device/numa_node")
    layer = read_small(port / "link_layer") if port else None
    try:
        pci = (device / "device").resolve(strict=True).name
    except OSError:
        pci = None
    return Nic.model_validate(
        {
            "name": device.name,
            "pci": pci if pci and ":" in pci else None,
            "numa": int(numa) if numa is not None and numa.isdecimal() else None,
            "link_layer": layer if layer in ("InfiniBand", "Ethernet") else None,
            "active": None if state is None else "ACTIVE" in state,
            "rate_gbit_s": float(number) if number.replace(".", "", 1).isdecimal() else None,
        }
    )
