"""Which node and GPU carries which rank.

Ranks are numbered ``pp, dp, sp, tp`` outermost first and fill a node before the next one. The order of the GPUs
inside a node puts tp groups into one NVLink island, the order of the nodes decides which of them share a leaf.
"""

from __future__ import annotations

from hpjob.core.errors import UserInputError
from hpjob.plan.model import ParallelDegrees, RankPlace
from hpjob.plan.placement_cost import PlacementCost, Traffic, placement_cost
from hpjob.plan.placement_gpus import GpuOrders, remarks
from hpjob.plan.placement_nodes import node_order
from hpjob.topology.model import Topology


def place(
    degrees: ParallelDegrees, topology: Topology, gpus_per_node: int, traffic: Traffic | None = None
) -> tuple[Topology, tuple[RankPlace, ...]]:
    """Order the nodes of a topology and give every rank its GPU.

    tp (and sp, ep) groups are put where all pairs of GPUs are linked, pipeline neighbours under one leaf switch (or
    in one block) where the leaves are large enough, the members of a dp group at equal places of their nodes, which
    are on one rail. Never costs more than consecutive ranks on the nodes in the order of their names.

    Args:
        degrees: Sizes of the axes.
        topology: All its nodes are used.
        gpus_per_node: Ranks a node.
        traffic: Weights of the groups; None = the default ranking.

    Returns:
        The topology with its nodes in rank order and with notes on unusual nodes, and one place a rank.

    Raises:
        UserInputError: The ranks do not fill the nodes.
    """
    world, slots = degrees.world_size, len(topology.nodes) * gpus_per_node
    if world != slots:
        raise UserInputError(
            f"a plan for {world} ranks does not fill {len(topology.nodes)} nodes of {gpus_per_node} GPUs",
            hint="plan again for these nodes",
        )
    weights = traffic or Traffic()
    orders = GpuOrders(degrees, gpus_per_node)
    nodes = [topology.nodes[index] for index in node_order(degrees, topology, gpus_per_node, weights)]
    notes = dict.fromkeys((*topology.notes, *remarks(nodes, orders)))
    ordered = topology.model_copy(update={"nodes": tuple(nodes), "notes": tuple(notes)})
    return ordered, _places([orders.of(node).gpus for node in nodes])


def consecutive(topology: Topology, gpus_per_node: int) -> tuple[Topology, tuple[RankPlace, ...]]:
    """Return what a launcher does that knows no topology: nodes in the order of their names, GPUs by index."""
    nodes = tuple(sorted(topology.nodes, key=lambda node: node.name))
    return topology.model_copy(update={"nodes": nodes}), _places([tuple(range(gpus_per_node))] * len(nodes))


def compare(
    degrees: ParallelDegrees, topology: Topology, gpus_per_node: int, traffic: Traffic | None = None
) -> tuple[PlacementCost, PlacementCost]:
    """Return the cost of the placement, and that of consecutive ranks in the order of the names."""
    placed = place(degrees, topology, gpus_per_node, traffic)
    plain = consecutive(topology, gpus_per_node)
    return placement_cost(degrees, *placed, traffic), placement_cost(degrees, *plain, traffic)


def _places(gpus: list[tuple[int, ...]]) -> tuple[RankPlace, ...]:
    pairs = [(node, gpu) for node, order in enumerate(gpus) for gpu in order]
    return tuple(RankPlace(rank=rank, node=node, gpu=gpu) for rank, (node, gpu) in enumerate(pairs))
