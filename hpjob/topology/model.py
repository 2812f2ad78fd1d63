"""One sourced model of a machine, from a GPU to the spine.

Three-valued facts: a link or number is known, known to be absent, or ``None`` = not seen.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hpjob.core.schema import Persisted

PositiveInt = Annotated[int, Field(gt=0)]


class Gpu(Persisted):
    """One accelerator of a node."""

    index: int
    model: str | None = None
    memory_gib: float | None = None
    numa: int | None = None
    pci: str | None = None
    """PCI bus id as the source prints it."""
    mig: tuple[str, ...] | None = None
    """Profiles of the MIG slices; an empty tuple = whole, None = not seen."""
    display: bool | None = None
    """True = a display card, no training device."""


class Link(Persisted):
    """What one source says about the path between two GPUs of a node."""

    a: int
    b: int
    linked: bool | None = None
    """NVLink or XGMI between the two: yes, no, None = not seen."""
    count: int | None = None
    """Bonded links of the pair."""
    pcie_level: str | None = None
    """PIX, PXB, PHB, NODE or SYS where no NVLink shows."""


class Nic(Persisted):
    """One port that can carry traffic between nodes."""

    name: str
    pci: str | None = None
    numa: int | None = None
    link_layer: Literal["InfiniBand", "Ethernet"] | None = None
    active: bool | None = None
    rate_gbit_s: float | None = None
    """As reported; a port that is down reports a default."""
    near_gpus: tuple[int, ...] | None = None
    """GPUs for which no NIC is nearer; ties are kept."""
    leaf: str | None = None
    """Leaf switch at the other end of the cable."""
    rail: int | None = None
    rail_from: Literal["switch port", "vendor table", "text", "nearest NIC"] | None = None
    """How the rail is known; ``nearest NIC`` is a guess."""


class Island(Persisted):
    """GPUs of one node that reach each other over NVLink or XGMI."""

    kind: Literal["nvlink", "xgmi"]
    gpus: tuple[int, ...]
    all_to_all: bool | None = None
    """Every pair linked; None = not seen."""
    cliques: tuple[tuple[int, ...], ...] = ()
    """Largest all-to-all sets of an island that is not all-to-all: where tensor parallelism may go."""
    bandwidth_gb_s: float | None = None
    """Per GPU and direction."""


class Node(Persisted):
    """One host."""

    name: str
    gpus: tuple[Gpu, ...] = ()
    islands: tuple[Island, ...] | None = None
    """None = not seen; an empty tuple = known to have none."""
    cpus: int | None = None
    memory_gib: float | None = None
    nic_bandwidth_gb_s: float | None = None
    """All NICs of the node together, per direction."""
    links: tuple[Link, ...] | None = None
    """Pairs of GPUs with what was seen of each; None = no source showed pairs."""
    nics: tuple[Nic, ...] | None = None
    """None = not seen; an empty tuple = known to have none."""
    state: str | None = None
    """What the scheduler says of the node, such as ``idle`` or ``drained``."""


class Switch(Persisted):
    """A leaf (level 0) names nodes; a higher switch names switches."""

    name: str
    level: int
    nodes: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()


class Block(Persisted):
    """Nodes of one block of Slurm's topology/block."""

    name: str
    nodes: tuple[str, ...]


class NvlinkDomain(Persisted):
    """Nodes whose GPUs share one NVLink fabric partition (cluster UUID and clique)."""

    name: str
    nodes: tuple[str, ...]


class MachineType(Persisted):
    """A known kind of node, with the speeds that the planner needs; ``topology/<name>.yaml``."""

    version: Literal[1] = 1
    name: str
    description: str
    gpu_model: str
    gpus_per_node: PositiveInt
    gpu_memory_gib: float
    peak_tflops_bf16: float
    peak_tflops_fp32: float
    memory_bandwidth_gb_s: float
    island_size: PositiveInt
    """GPUs that reach each other over NVLink; 1 = none."""
    island_kind: Literal["nvlink", "xgmi", "pcie", "host"]
    island_bandwidth_gb_s: float
    """Per GPU and direction inside the island."""
    nic_bandwidth_gb_s: float
    """All NICs of a node together, per direction."""
    nic_latency_us: float = 5.0
    island_latency_us: float = 2.0
    host_memory_gib: float | None = None
    """Of a node; None = not known."""
    host_bandwidth_gb_s: float | None = None
    """Per GPU and direction between its memory and the host's; None = not known."""
    sources: dict[str, str]
    """Field name -> where the value comes from."""


class Topology(Persisted):
    """The nodes that a job may use or has been given, and what links them."""

    version: Literal[1] = 1
    nodes: tuple[Node, ...]
    """In the order in which ranks are placed."""
    machine: MachineType | None = None
    """Speeds of the nodes when their kind is known."""
    switches: tuple[Switch, ...] | None = None
    """None = not seen."""
    blocks: tuple[Block, ...] | None = None
    """Base blocks; a node is in one at most."""
    aggregated_blocks: tuple[Block, ...] | None = None
    """Blocks of neighbouring base blocks, of each of Slurm's larger ``BlockSizes``; None = not seen."""
    domains: tuple[NvlinkDomain, ...] | None = None
    """NVLink domains across nodes; None = not seen, an empty tuple = known to have none."""
    source: str
    """Where the facts come from: ``slurm``, ``machine:dgx-a100-80g``, ``local``, …"""
    notes: tuple[str, ...] = ()
    """What was not found and why; disagreements between sources."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Fact (``nodes.NAME.FIELD``, ``switches``, ``blocks``, ``domains``) -> the source that said it."""
