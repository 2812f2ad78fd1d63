"""Speeds of a cluster of one kind of node, and the links that a group of ranks sees."""

from __future__ import annotations

from dataclasses import dataclass

from hpjob.topology.model import MachineType


@dataclass(frozen=True, slots=True)
class GpuConstants:
    """Fractions of the printed peaks that kernels reach, and their fixed costs."""

    gemm_efficiency: float = 0.80
    """Large matrix product, of the dense peak."""
    num_sms: int = 108
    gemm_ramp_k: float = 400.0
    """Inner length at which a product reaches half of its efficiency."""
    attention_efficiency: float = 0.50
    """Fused attention forward, of the dense peak."""
    attention_backward_efficiency: float = 0.40
    memory_efficiency: float = 0.80
    """Element-wise kernels, of the printed memory bandwidth."""
    launch_us: float = 4.0
    link_efficiency: float = 0.75
    """Large collectives inside an island, of the printed bandwidth."""
    nic_efficiency: float = 0.75


_CPU_CORE = GpuConstants(num_sms=1, gemm_ramp_k=64.0, launch_us=20.0)


@dataclass(frozen=True, slots=True)
class Link:
    """What one rank of a group gets."""

    bandwidth: float
    """Bytes per second and direction."""
    latency: float
    """Seconds of one step of a ring."""
    crosses_nodes: bool


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of node, as the cost models see it; bytes, seconds and FLOP/s."""

    name: str
    memory_gib: float
    peak_half: float
    peak_single: float
    memory_bandwidth: float
    gpus_per_node: int
    island_size: int
    island_bandwidth: float
    island_latency: float
    nic_bandwidth: float
    """All NICs of a node together."""
    nic_latency: float
    constants: GpuConstants
    is_cpu: bool = False

    def link(self, size: int, stride: int) -> Link:
        """Return the slowest link of a group of ranks ``r, r + stride, …``.

        Members inside one island reach each other over it. Members on several nodes share the node's
        NICs with all other groups of the node; a group with g members a node gets g of them.
        """
        span = size * stride
        if span <= self.island_size:
            return Link(self.island_bandwidth * self.constants.link_efficiency, self.island_latency, False)
        per_node = max(1, min(size, self.gpus_per_node // stride)) if stride < self.gpus_per_node else 1
        share = self.nic_bandwidth * self.constants.nic_efficiency * per_node / self.gpus_per_node
        if span <= self.gpus_per_node:
            # Islands of one node that are not linked: through the host, as slow as PCIe.
            return Link(min(self.island_bandwidth * self.constants.link_efficiency, 12e9), self.island_latency, False)
        if per_node > 1:
            share = min(share, self.island_bandwidth * self.constants.link_efficiency)
        return Link(share, self.nic_latency, True)


def hardware_of(machine: MachineType, gpus_per_node: int | None = None) -> Hardware:
    """Return the speeds of a machine when ``gpus_per_node`` of its GPUs are used."""
    used = gpus_per_node or machine.gpus_per_node
    island = machine.island_size if machine.island_size > machine.gpus_per_node else min(machine.island_size, used)
    if machine.island_kind in ("pcie", "host"):
        # No NVLink, but the host's own bus reaches every GPU of the node.
        island = used
    return Hardware(
        name=machine.name,
        memory_gib=machine.gpu_memory_gib,
        peak_half=machine.peak_tflops_bf16 * 1e12,
        peak_single=machine.peak_tflops_fp32 * 1e12,
        memory_bandwidth=machine.memory_bandwidth_gb_s * 1e9,
        gpus_per_node=used,
        island_size=max(1, island),
        island_bandwidth=machine.island_bandwidth_gb_s * 1e9,
        island_latency=machine.island_latency_us * 1e-6,
        nic_bandwidth=machine.nic_bandwidth_gb_s * 1e9,
        nic_latency=machine.nic_latency_us * 1e-6,
        constants=_CPU_CORE if machine.island_kind == "host" else GpuConstants(),
        is_cpu=machine.island_kind == "host",
    )
