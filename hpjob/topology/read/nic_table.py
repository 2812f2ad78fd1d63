"""A vendor's table of NICs, rails and GPUs for one machine type (YAML with a ``pfs`` list)."""

from __future__ import annotations

import re

from hpjob.topology.model import Gpu, Nic, Node, Topology
from hpjob.topology.read.reading import LOCAL_NODE, Facts, Reader, Reading
from hpjob.topology.read.text import Source

TITLE = "vendor NIC table"
_ITEM = re.compile(r"^\s*(-\s+)?([A-Za-z][A-Za-z0-9_]{1,40})\s*:(.*)$")
_GPU = re.compile(r"GPU\s*([0-9]{1,4})", re.I)


def confidence(source: Source) -> float:
    """High when rows connect RDMA devices with GPUs."""
    text = source.text
    return 0.95 if "connectedGPU" in text and ("rdmaDevice" in text or "pciAddress" in text) else 0.0


def read(source: Source) -> Reading:
    """Read every row by its keys; the indentation does not matter."""
    rows = _rows(source)
    rails = sorted((row for row in rows if row.get("rail", "").isdecimal()), key=_gpu_index)
    indices = sorted({_gpu_index(row) for row in rows if _gpu_index(row) < 10_000})
    facts: Facts = {
        "gpus": len(indices),
        "rail_nic_of_gpu": [row.get("rdmaDevice") or None for row in rails],
        "rail_of_gpu": [int(row["rail"]) for row in rails],
        "not_rail": [row.get("pciAddress") for row in rows if not row.get("rail", "").isdecimal()],
        "numa_of_gpu": [_int(row.get("numaNode", "")) for row in rails],
    }
    numa = {_gpu_index(row): _int(row.get("numaNode", "")) for row in rows}
    node = Node(
        name=LOCAL_NODE,
        gpus=tuple(Gpu(index=index, numa=numa[index]) for index in indices),
        nics=tuple(_nic(row) for row in rows),
    )
    sources = {f"nodes.{LOCAL_NODE}.{name}": TITLE for name in ("gpus", "nics")}
    return Reading(kind="nic_preset", facts=facts, topology=Topology(nodes=(node,), source=TITLE, sources=sources))


def _rows(source: Source) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    inside = False
    for line in source.lines:
        match = _ITEM.match(line) if ":" in line and len(line) < 500 else None
        if match is None:
            continue
        dash, key, value = match.groups()
        if key == "pfs":
            inside = True
        elif dash:
            rows.append({key: value.strip(" \t\"'")})
            inside = True
        elif inside and rows:
            rows[-1].setdefault(key, value.strip(" \t\"'"))
    return [row for row in rows if "connectedGPU" in row or "pciAddress" in row]


def _gpu_index(row: dict[str, str]) -> int:
    match = _GPU.search(row.get("connectedGPU", ""))
    return int(match[1]) if match else 10_000


def _int(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 9 else None


def _nic(row: dict[str, str]) -> Nic:
    rail = _int(row.get("rail", ""))
    gpu = _gpu_index(row)
    return Nic(
        name=row.get("rdmaDevice") or row.get("networkInterface") or row.get("pciAddress") or "unnamed",
        pci=row.get("pciAddress") or None,
        numa=_int(row.get("numaNode", "")),
        near_gpus=(gpu,) if gpu < 10_000 else None,
        rail=rail,
        rail_from="vendor table" if rail is not None else None,
    )


READER = Reader(kind="nic_preset", title=TITLE, confidence=confidence, read=read)
