"""Segments of a job on Slurm's block topology: how many of its nodes have to lie in one block.

Without ``--segment`` Slurm spreads a job that is larger than a block over its blocks as they have room, such as one
node here and three there; ranks that belong together then meet across blocks. With it, nodes come in groups of that
size, each inside one block. Sources: sbatch(1) of Slurm 24.11, ``--segment``; topology.conf(5), ``BlockSizes``.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpjob.plan.model import ParallelDegrees, Plan
from hpjob.slurm.options import sbatch_takes
from hpjob.topology.model import Topology


def wanted_segment(plan: Plan, topology: Topology, options: Iterable[str] = ()) -> int | None:
    """Return the nodes of a segment for a plan; None = Slurm's own choice is as good, or it knows no segments.

    Args:
        plan: The plan.
        topology: Of the cluster, with its blocks.
        options: Options that a person passed through; a ``--segment`` of their own counts, and with nodes of
            their own Slurm 24.11 refuses segments.
    """
    if any(option.startswith(("--segment=", "--nodelist=", "-w")) for option in options):
        return None
    size = segment_nodes(plan.degrees, plan.gpus_per_node, topology)
    return size if size is not None and sbatch_takes(f"--segment={size}") else None


def segment_nodes(degrees: ParallelDegrees, gpus_per_node: int, topology: Topology) -> int | None:
    """Return the nodes that have to share a block so that groups of ranks do.

    Those are the nodes of a group of tensor and sequence ranks that is larger than a node, times the stages that pass
    activations to each other; as many of these stages as a block can hold. A job that fits into one block needs none:
    Slurm puts it into one anyway.

    Args:
        degrees: Sizes of the axes.
        gpus_per_node: Ranks a node.
        topology: With its blocks; without any there are no segments.
    """
    blocks = [len(block.nodes) for block in topology.blocks or ()]
    num_nodes = degrees.world_size // gpus_per_node
    if topology.switches or not blocks or num_nodes <= max(blocks):
        return None
    unit, together = _groups(degrees, gpus_per_node)
    sizes = [size for size in _divisors(together) if size % unit == 0]
    if not any(_fits(size, num_nodes, blocks) for size in sizes if size > 1) and _too_large_unsegmented(
        num_nodes, topology
    ):
        sizes = list(_divisors(num_nodes))
    return max((size for size in sizes if size > 1 and _fits(size, num_nodes, blocks)), default=None)


def _groups(degrees: ParallelDegrees, per_node: int) -> tuple[int, int]:
    """Nodes of one tensor and sequence group, and nodes of these groups of all stages of a pipeline."""
    unit = max(1, -(-degrees.tp * degrees.sp // per_node))
    stage_ranks = degrees.dp * degrees.sp * degrees.tp
    if stage_ranks < per_node:  # several stages a node
        return unit, max(1, degrees.world_size // per_node)
    return unit, unit * degrees.pp


def _fits(size: int, num_nodes: int, blocks: list[int]) -> bool:
    """Whether the job is so many whole segments, and the blocks hold them."""
    return num_nodes % size == 0 and sum(block // size for block in blocks) * size >= num_nodes


def _too_large_unsegmented(num_nodes: int, topology: Topology) -> bool:
    """Whether no aggregated block holds the job: Slurm refuses it then, unless it comes in segments."""
    above = [len(block.nodes) for block in topology.aggregated_blocks or ()]
    return bool(above) and max(above) < num_nodes


def _divisors(number: int) -> Iterable[int]:
    return (size for size in range(1, number + 1) if number % size == 0)
