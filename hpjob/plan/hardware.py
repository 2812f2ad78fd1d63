"""Speeds of a cluster of one kind of node, and the links that a group of ranks sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import hypot, log2
from typing import Literal

from hpjob.plan.constants import Calibration, GpuConstants, calibration, gpu_constants
from hpjob.topology.model import MachineType

THROUGH_HOST = 12e9
"""Bytes per second between GPUs of a node whose islands are not linked."""
_HOST_LINK = 0.8
"""Part of the printed bandwidth that copies between pinned host memory and a GPU reach."""
_HOST_LINK_GB_S = 16.0
"""Printed bandwidth where a machine does not say: PCIe 3 x16."""
_MESSAGE_HALF = 1.0e6
"""Bytes of a rank's message at which a link reaches half of its bandwidth."""


@dataclass(frozen=True, slots=True)
class Link:
    """What one rank of a group gets."""

    bandwidth: float
    """Bytes per second and direction."""
    latency: float
    """Seconds of one step of a ring."""
    crosses_nodes: bool

    def ring(self, size: int, num_bytes: float) -> float:
        """Seconds of an all-gather or reduce-scatter of ``num_bytes`` (the gathered size) over a group."""
        if size < 2:
            return 0.0
        steps = min(size - 1, 2 * log2(size) + 1)
        return (size - 1) / size * num_bytes / self.bandwidth + steps * self.latency

    def send(self, num_bytes: float) -> float:
        """Seconds of a message to a neighbour."""
        return num_bytes / self.bandwidth + self.latency


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """Seconds of one layer and microbatch on one rank, without communication."""

    forward: float
    backward: float


@dataclass(frozen=True, eq=False)
class Hardware:
    """One kind of node, as the cost models see it; bytes, seconds and FLOP/s."""

    name: str
    memory_gib: float
    peak_half: float
    peak_single: float
    peak_fp8: float
    memory_bandwidth: float
    gpus_per_node: int
    island_size: int
    island_bandwidth: float
    island_latency: float
    nic_bandwidth: float
    """All NICs of a node together."""
    nic_latency: float
    gpu: GpuConstants
    fit: Calibration
    linked_size: int = 0
    """GPUs of a node that NVLink connects, though not every pair: rings find their way round."""
    lines_up: bool = False
    """Whether the order of a node's GPUs keeps pairs without a link apart; see ``placement_gpus``."""
    is_cpu: bool = False
    island_kind: Literal["nvlink", "xgmi", "pcie", "host"] = "nvlink"
    host_memory_gib: float | None = None
    """Of a node; None = not known."""
    host_bandwidth: float = THROUGH_HOST
    """Per GPU and direction between its memory and the host's."""
    measured_layers: Mapping[tuple[object, ...], MeasuredLayer] = field(default_factory=dict)
    """(hidden, ffn, tokens, seq, tp, sp, ep, sequence mode, precision) -> times that replace the model's."""

    @property
    def unit(self) -> str:
        """What a rank runs on, in words."""
        return "rank" if self.is_cpu else "GPU"

    @property
    def gemm_efficiency(self) -> float:
        special = {"a100": self.fit.gemm_a100, "h100": self.fit.gemm_h100, "b200": self.fit.gemm_b200}
        return self.gpu.gemm * self.fit.gemm * special.get(self.gpu.name, 1.0)

    def link(self, size: int, stride: int, world: int | None = None, *, all_pairs: bool = False) -> Link:
        """Return the slowest link of the groups of ranks ``r, r + stride, …``.

        Members inside one island reach each other over it. Members on several nodes share the node's
        NICs with all other groups of the node; a group with g members a node gets g of them.

        Args:
            size: Members of a group.
            stride: From a member to the next.
            world: Ranks of all groups, which come one after the other; None = only the first one is asked for.
            all_pairs: Every member sends to every other one, and not only to its neighbours on a ring.
        """
        span = size * stride
        island = self.island_bandwidth * self.fit.island
        # A ring of several finds its way round a missing link; two ranks may be the very pair that lacks it.
        goes_round = size > 2 or self._lines_up(stride)
        if _all_inside(span, self.island_size, world):
            return Link(island, self.island_latency, False)
        if goes_round and _all_inside(span, self.linked_size, world):
            # What a pair without a link exchanges takes the host's way while the others use theirs.
            seen = min(island, (size - 1) * THROUGH_HOST) if all_pairs else island
            return Link(seen, self.island_latency, False)
        if _all_inside(span, self.gpus_per_node, world):
            return self._through_host
        per_node = max(1, min(size, self.gpus_per_node // stride)) if stride < self.gpus_per_node else 1
        share = self.nic_bandwidth * self.fit.network * per_node / self.gpus_per_node
        return Link(min(share, island) if per_node > 1 else share, self.nic_latency, True)

    def hop(self, first: int, stride: int, to: int) -> Link:
        """Return the slowest link between ``stride`` ranks from ``first`` on and as many from ``to`` on, in order.

        Ranks from one of them to the other fill nodes and islands one after the other; each uses its own part of
        the NICs.
        """
        begin, last = min(first, to), max(first, to) + stride - 1
        linked = self.linked_size if self._lines_up(abs(to - first)) else 0
        for block in (self.island_size, linked):
            if block and begin // block == last // block:
                return Link(self.island_bandwidth * self.fit.island, self.island_latency, False)
        if begin // self.gpus_per_node == last // self.gpus_per_node:
            return self._through_host
        share = self.nic_bandwidth * self.fit.network / self.gpus_per_node
        return Link(share, self.nic_latency, True)

    def _lines_up(self, stride: int) -> bool:
        count = self.gpus_per_node
        return self.lines_up and stride < count and (count % stride == 0 or count % (count - stride) == 0)

    @property
    def _through_host(self) -> Link:
        return Link(min(self.island_bandwidth * self.fit.island, THROUGH_HOST), self.island_latency, False)

    def product(self, m: float, n: float, k: float, *, batch: float = 1, peak: float | None = None) -> float:
        """Seconds of ``batch`` products (m, k) x (k, n) in 16-bit numbers.

        Tiles of 128 x 128 fill the multiprocessors in waves, the last of them partly; reading and writing
        the operands hides behind long products and not behind short ones; dimensions that are no multiple
        of 64 elements miss the fast kernels.
        """
        waves = max(1.0, m / 128) * max(1.0, n / 128) * batch / self.gpu.num_sms
        speed = (peak or self.peak_half) * self.gemm_efficiency
        slow = 1.0 + self.fit.misaligned * _steps_off(n, k)
        compute = 2.0 * m * n * k * batch / speed * slow * (waves + self.fit.tail_waves) / waves
        moved = 2.0 * batch * (m * k + k * n + m * n) / (self.memory_bandwidth * self.gpu.memory)
        return hypot(compute, moved) + _LAUNCH_S

    def traffic(self, num_bytes: float) -> float:
        """Seconds of element-wise kernels that read and write ``num_bytes``."""
        return num_bytes * self.fit.traffic / (self.memory_bandwidth * self.gpu.memory)


def _all_inside(span: int, block: int, world: int | None) -> bool:
    """Whether none of the groups that span so many ranks, one after the other, leaves a block of ranks."""
    return span <= block and (world is None or world <= block or block % span == 0)


_LAUNCH_S = 3e-6
_WITHOUT_FP8 = ("v100", "a100", "mi250", "cpu")


def _steps_off(n: float, k: float) -> float:
    """How far the worse dimension is from the alignment that the fast kernels want.

    A step for every halving below 64 elements; below 8 elements (16 bytes) each counts five times.
    """
    worst = 0.0
    for size in (int(n), int(k)):
        halvings = max(0, 7 - (size & -size).bit_length()) if size else 0
        worst = max(worst, halvings if halvings <= 3 else 3 + 5.0 * (halvings - 3))
    return worst


def hardware_of(machine: MachineType, gpus_per_node: int | None = None, fit: Calibration | None = None) -> Hardware:
    """Return the speeds of a machine when ``gpus_per_node`` of its GPUs are used."""
    used = gpus_per_node or machine.gpus_per_node
    island = machine.island_size if machine.island_size > machine.gpus_per_node else min(machine.island_size, used)
    if machine.island_kind in ("pcie", "host"):
        # No NVLink, but the host's own bus reaches every GPU of the node.
        island = used
    constants = gpu_constants(machine.gpu_model)
    return Hardware(
        name=machine.name,
        memory_gib=machine.gpu_memory_gib,
        peak_half=machine.peak_tflops_bf16 * 1e12,
        peak_single=machine.peak_tflops_fp32 * 1e12,
        peak_fp8=machine.peak_tflops_bf16 * (1e12 if constants.name in _WITHOUT_FP8 else 2e12),
        memory_bandwidth=machine.memory_bandwidth_gb_s * 1e9,
        gpus_per_node=used,
        island_size=max(1, island),
        island_bandwidth=machine.island_bandwidth_gb_s * 1e9,
        island_latency=machine.island_latency_us * 1e-6,
        nic_bandwidth=machine.nic_bandwidth_gb_s * 1e9,
        nic_latency=machine.nic_latency_us * 1e-6,
        gpu=constants,
        fit=fit or calibration(),
        is_cpu=machine.island_kind == "host",
        island_kind=machine.island_kind,
        host_memory_gib=machine.host_memory_gib,
        host_bandwidth=_HOST_LINK * (machine.host_bandwidth_gb_s or _HOST_LINK_GB_S) * 1e9,
    )
