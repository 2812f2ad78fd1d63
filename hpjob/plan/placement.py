"""Which node and GPU carries which rank.

Ranks are numbered ``pp, dp, sp, tp`` outermost first and fill a node before the next one, so tp groups
share an NVLink island and neighbouring pipeline stages are whole groups of nodes apart. The order of
the nodes decides which of them share a leaf switch.
"""

from __future__ import annotations

from hpjob.core.errors import UserInputError
from hpjob.plan.model import ParallelDegrees, RankPlace
from hpjob.topology.groups import all_to_all_groups
from hpjob.topology.model import Node, Topology


def place(degrees: ParallelDegrees, topology: Topology, gpus_per_node: int) -> tuple[Topology, tuple[RankPlace, ...]]:
    """Order the nodes of a topology and give every rank its GPU.

    Pipeline neighbours end under one leaf switch (or in one block) where the leaves are large enough; a
    tp group that spans nodes stays in one block. GPUs of one NVLink island are neighbours in a node.

    Returns:
        The topology with its nodes in rank order, and one place a rank.

    Raises:
        UserInputError: The ranks do not fill the nodes.
    """
    world, slots = degrees.world_size, len(topology.nodes) * gpus_per_node
    if world != slots:
        raise UserInputError(
            f"a plan for {world} ranks does not fill {len(topology.nodes)} nodes of {gpus_per_node} GPUs",
            hint="plan again for these nodes",
        )
    nodes = _ordered_nodes(degrees, topology, gpus_per_node)
    places: list[RankPlace] = []
    for index, node in enumerate(nodes):
        gpus = _ordered_gpus(node, gpus_per_node, degrees.tp)
        places.extend(RankPlace(rank=index * gpus_per_node + i, node=index, gpu=gpu) for i, gpu in enumerate(gpus))
    return topology.model_copy(update={"nodes": tuple(nodes)}), tuple(places)


def _ordered_gpus(node: Node, count: int, tp: int) -> list[int]:
    """GPUs of one tp group next to each other and all linked where that is possible; then by island."""
    known = [gpu.index for gpu in node.gpus] or list(range(count))
    groups = all_to_all_groups(node, tp) if 1 < tp <= count == len(known) else None
    order: list[int] = [gpu for group in groups or () for gpu in group]
    for island in sorted(node.islands or (), key=lambda island: (-len(island.gpus), island.gpus)):
        order += [gpu for gpu in island.gpus if gpu in known and gpu not in order]
    order += [gpu for gpu in known if gpu not in order]
    return order[:count] if len(order) >= count else list(range(count))


def _ordered_nodes(degrees: ParallelDegrees, topology: Topology, gpus_per_node: int) -> list[Node]:
    groups = _groups(topology)
    stage_ranks = degrees.dp * degrees.sp * degrees.tp
    stage_nodes = stage_ranks // gpus_per_node if stage_ranks % gpus_per_node == 0 else 0
    if degrees.pp == 1 or stage_nodes <= 1 or degrees.tp > gpus_per_node:
        # Neighbouring nodes hold neighbouring stages (or one group): leaf by leaf is the best order.
        return [node for group in groups for node in group]
    return _columns(groups, degrees.pp, stage_nodes)


def _columns(groups: list[list[Node]], pp: int, stage_nodes: int) -> list[Node]:
    """Fill ``stage_nodes`` columns of ``pp`` nodes each from one leaf where it can hold them."""
    columns: list[list[Node]] = []
    rest: list[Node] = []
    for group in groups:
        whole = len(group) // pp * pp
        columns += [group[start : start + pp] for start in range(0, whole, pp)]
        rest += group[whole:]
    columns += [rest[start : start + pp] for start in range(0, len(rest), pp)]
    return [columns[column][stage] for stage in range(pp) for column in range(stage_nodes)]


def _groups(topology: Topology) -> list[list[Node]]:
    """Nodes by leaf switch or block, largest group first, in the given order inside a group."""
    members: dict[str, str] = {}
    for block in topology.blocks or ():
        members.update(dict.fromkeys(block.nodes, f"block {block.name}"))
    for switch in topology.switches or ():
        if switch.level == 0:
            for name in switch.nodes:
                members.setdefault(name, f"leaf {switch.name}")
    groups: dict[str, list[Node]] = {}
    for node in topology.nodes:
        groups.setdefault(members.get(node.name, ""), []).append(node)
    # sorted() keeps the given order among groups of one size.
    return sorted(groups.values(), key=len, reverse=True)
