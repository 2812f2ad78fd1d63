"""From the words of a table to speeds: GPU names and descriptions of the network."""

from __future__ import annotations

import re
from functools import lru_cache

from hpjob.topology.load import load_machine
from hpjob.topology.model import MachineType

_MACHINES: tuple[tuple[str, str], ...] = (
    (r"GB200|GB300", "gb200-nvl72"),
    (r"B200|B300", "hgx-b200"),
    (r"H200", "hgx-h200"),
    (r"H100|H800|GH200", "hgx-h100"),
    (r"A100.*40", "dgx-a100-40g"),
    (r"A100|A800", "dgx-a100-80g"),
    (r"V100", "dgx2"),
    (r"L40S", "pcie-l40s"),
    (r"MI300|MI325", "mi300x"),
    (r"MI250", "mi250x"),
)
_CUT_LINKS = {"A800": 200.0, "H800": 200.0}
"""NVLink of export variants: 8 links of 25 GB/s."""


@lru_cache(maxsize=256)
def machine_for_row(gpu: str, gpus_per_node: int, interconnect: str) -> MachineType | None:
    """Return the machine that a row describes, or None for an unknown GPU."""
    name = next((machine for pattern, machine in _MACHINES if re.search(pattern, gpu)), None)
    if name is None:
        return None
    machine = load_machine(name)
    per_node = gpus_per_node or machine.gpus_per_node
    nic = network_gb_s(interconnect) or machine.nic_bandwidth_gb_s * per_node / machine.gpus_per_node
    wide = machine.island_size > machine.gpus_per_node
    update: dict[str, object] = {
        "gpus_per_node": per_node,
        "island_size": machine.island_size if wide else min(per_node, max(machine.island_size, per_node)),
        "nic_bandwidth_gb_s": nic,
    }
    for word, bandwidth in _CUT_LINKS.items():
        if word in gpu:
            update["island_bandwidth_gb_s"] = bandwidth
    if re.search(r"PCI-?E", gpu, re.IGNORECASE):
        update |= {"island_kind": "pcie", "island_bandwidth_gb_s": 22.0, "island_latency_us": 8.0}
    return machine.model_copy(update=update)


def network_gb_s(text: str) -> float | None:
    """Return all NICs of a node in GB/s from words such as ``8x HDR200 IB`` or ``1600 Gbps node-node``."""
    if match := re.search(r"(\d+)\s*[x*]\s*(?:[A-Za-z-]+\s*)*(\d{2,3})\b", text):
        return int(match[1]) * int(match[2]) / 8
    if match := re.search(r"([\d.]+)\s*(Gbps|Gb/s|Tbps)", text):
        return float(match[1]) * (1000 if match[2] == "Tbps" else 1) / 8
    return None
