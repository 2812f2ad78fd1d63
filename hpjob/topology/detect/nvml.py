"""NVIDIA GPUs of this host through NVML: no text is parsed, and no tool has to be on the PATH."""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from hpjob.topology.detect.host import numa_of_pci, short_busid
from hpjob.topology.model import Gpu, Island, Link, Node, NvlinkDomain, Topology
from hpjob.topology.read.graph import Pair, all_linked, islands, maximal_cliques

SOURCE = "NVML"
_MAX_LINKS = 18
"""Links of a GPU where the binding does not say how many there can be."""
_FABRIC_COMPLETED = 3
_P2P_UNKNOWN = 6
_DEGRADED_MASK, _DEGRADED = 0x3, 1
"""Bits of the fabric's health mask that tell of bandwidth, and their value when it is degraded."""
_LEVELS = {10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


@dataclass
class _Devices:
    handles: list[Any]
    gpus: list[Gpu] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def nvml_topology(name: str) -> Topology | None:
    """GPUs, links and NVLink domain of this host; None with no NVIDIA driver.

    A function that a driver lacks leaves its fact unknown.
    """
    try:
        import pynvml  # noqa: PLC0415
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return _read(pynvml, name)
    finally:
        pynvml.nvmlShutdown()


def _ask(pynvml: Any, function: str, *arguments: Any) -> Any:
    """Call a function of NVML; None when the driver or the binding does not have it."""
    call = getattr(pynvml, function, None)
    if call is None:
        return None
    try:
        return call(*arguments)
    except pynvml.NVMLError:
        return None


def _read(pynvml: Any, name: str) -> Topology:
    count = _ask(pynvml, "nvmlDeviceGetCount") or 0
    handles = [_ask(pynvml, "nvmlDeviceGetHandleByIndex", index) for index in range(count)]
    devices = _Devices(handles)
    for index, handle in enumerate(handles):
        if handle is None:
            devices.notes.append(f"GPU {index} does not answer NVML")
        else:
            devices.gpus.append(_gpu(pynvml, index, handle))
    peers = _direct_peers(pynvml, devices)
    for a, b in combinations([gpu.index for gpu in devices.gpus], 2):
        devices.links.append(_link(pynvml, devices, a, b, peers))
    linked = {(link.a, link.b) for link in devices.links if link.linked}
    unknown = any(link.linked is None for link in devices.links)
    found = tuple(_island(group, linked, unknown) for group in islands([g.index for g in devices.gpus], linked))
    node = Node(
        name=name,
        gpus=tuple(devices.gpus),
        islands=None if unknown and not found else found,
        links=tuple(devices.links),
    )
    sources = {f"nodes.{name}.{field}": SOURCE for field in ("gpus", "islands", "links")}
    domains = _domains(pynvml, devices, name)
    if domains is not None:
        sources["domains"] = SOURCE
    return Topology(nodes=(node,), domains=domains, source=SOURCE, notes=tuple(devices.notes), sources=sources)


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _gpu(pynvml: Any, index: int, handle: Any) -> Gpu:
    memory = _ask(pynvml, "nvmlDeviceGetMemoryInfo", handle)
    pci = _ask(pynvml, "nvmlDeviceGetPciInfo", handle)
    busid = _text(pci.busId) if pci is not None else None
    name = _text(_ask(pynvml, "nvmlDeviceGetName", handle))
    mode = _ask(pynvml, "nvmlDeviceGetMigMode", handle)
    return Gpu(
        index=index,
        model=name,
        memory_gib=round(memory.total / 2**30, 2) if memory is not None else None,
        numa=numa_of_pci(busid) if busid else None,
        pci=short_busid(busid) if busid else None,
        mig=_slices(pynvml, handle) if mode and mode[0] == 1 else () if mode else None,
        display="display" in name.lower() if name else None,
    )


def _slices(pynvml: Any, handle: Any) -> tuple[str, ...]:
    names = []
    for index in range(_ask(pynvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        device = _ask(pynvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        name = _text(_ask(pynvml, "nvmlDeviceGetName", device)) if device is not None else None
        if name:
            names.append(name.split(" MIG ")[-1].split()[-1])
    return tuple(names)


def _direct_peers(pynvml: Any, devices: _Devices) -> dict[Pair, int]:
    """Active links whose far end is another GPU; behind NVSwitch the far end is none of them."""
    index_of = {gpu.pci: gpu.index for gpu in devices.gpus if gpu.pci}
    counts: dict[Pair, int] = {}
    for gpu in devices.gpus:
        for link in _link_numbers(pynvml):
            if not _ask(pynvml, "nvmlDeviceGetNvLinkState", devices.handles[gpu.index], link):
                continue
            remote = _ask(pynvml, "nvmlDeviceGetNvLinkRemotePciInfo", devices.handles[gpu.index], link)
            peer = index_of.get(short_busid(_text(remote.busId) or "")) if remote is not None else None
            if peer is not None and gpu.index < peer:
                counts[gpu.index, peer] = counts.get((gpu.index, peer), 0) + 1
    return counts


def _active_links(pynvml: Any, handle: Any) -> int:
    return sum(bool(_ask(pynvml, "nvmlDeviceGetNvLinkState", handle, link)) for link in _link_numbers(pynvml))


def _link_numbers(pynvml: Any) -> range:
    return range(getattr(pynvml, "NVML_NVLINK_MAX_LINKS", _MAX_LINKS))


def _link(pynvml: Any, devices: _Devices, a: int, b: int, peers: dict[Pair, int]) -> Link:
    """The driver's own word on NVLink between two GPUs, else what the links' far ends show."""
    first, second = devices.handles[a], devices.handles[b]
    index = getattr(pynvml, "NVML_P2P_CAPS_INDEX_NVLINK", None)
    status = _ask(pynvml, "nvmlDeviceGetP2PStatus", first, second, index) if index is not None else None
    linked = None if status in (None, _P2P_UNKNOWN) else status == getattr(pynvml, "NVML_P2P_STATUS_OK", 0)
    level = _ask(pynvml, "nvmlDeviceGetTopologyCommonAncestor", first, second)
    count = peers.get((a, b))
    if linked and count is None:
        count = min(_active_links(pynvml, first), _active_links(pynvml, second)) or None
    if count and linked is None:
        linked = True
    return Link(
        a=a, b=b, linked=linked, count=count if linked else None, pcie_level=_LEVELS.get(level) if level else None
    )


def _island(group: list[int], linked: set[Pair], unknown: bool) -> Island:
    whole = all_linked(group, linked)
    cliques = [] if whole else maximal_cliques(group, linked)
    largest = tuple(tuple(clique) for clique in cliques if len(clique) == len(cliques[0])) if cliques else ()
    return Island(
        kind="nvlink", gpus=tuple(group), all_to_all=True if whole else None if unknown else False, cliques=largest
    )


def _domains(pynvml: Any, devices: _Devices, name: str) -> tuple[NvlinkDomain, ...] | None:
    """Fabric partitions that this node is in; the zero UUID is no domain."""
    found: dict[str, None] = {}
    asked = False
    for gpu in devices.gpus:
        info = _fabric_info(pynvml, devices.handles[gpu.index])
        if info is None:
            continue
        asked = True
        uuid = bytes(info.clusterUuid)
        if info.state == _FABRIC_COMPLETED and any(uuid):
            text = uuid.hex()
            dashed = "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:32]))
            found[f"{dashed}.{info.cliqueId}"] = None
        elif any(uuid):
            devices.notes.append(f"GPU {gpu.index} has not completed joining its NVLink domain")
        if getattr(info, "healthMask", 0) & _DEGRADED_MASK == _DEGRADED:
            devices.notes.append(f"GPU {gpu.index}: the NVLink fabric calls its bandwidth degraded")
    if len(found) > 1:
        devices.notes.append(f"GPUs of one node are in different NVLink domains: {', '.join(found)}")
    return tuple(NvlinkDomain(name=domain, nodes=(name,)) for domain in found) if asked else None


def _fabric_info(pynvml: Any, handle: Any) -> Any:
    """The newest form of the fabric state that driver and binding share; the first one is going away."""
    for structure, function in (
        ("c_nvmlGpuFabricInfo_v2_t", "nvmlDeviceGetGpuFabricInfoV"),
        ("c_nvmlGpuFabricInfo_t", "nvmlDeviceGetGpuFabricInfo"),
    ):
        if not hasattr(pynvml, structure) or not hasattr(pynvml, function):
            continue
        info = getattr(pynvml, structure)()
        # The binding fills a structure that is handed over by reference.
        if _ask(pynvml, function, handle, byref(info)) is not None:
            return info
    return None
