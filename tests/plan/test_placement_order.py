"""Order of nodes against the order of their names: never dearer, and cheaper where there is something to gain."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpjob.plan.model import Axis, ParallelDegrees
from hpjob.plan.placement import compare, place
from hpjob.plan.placement_cost import Level, Traffic, placement_cost
from hpjob.topology.load import load_machine, machine_node
from hpjob.topology.model import Block, Gpu, Node, NvlinkDomain, Switch, Topology

HGX = load_machine("hgx-h100")


def tree(leaves: list[list[str]], order: list[str], *, per_spine: int = 2) -> Topology:
    """Nodes of 8 GPUs in an order, leaves under spines, spines under one root."""
    switches = [Switch(name=f"leaf{i}", level=0, nodes=tuple(names)) for i, names in enumerate(leaves)]
    groups = [switches[i : i + per_spine] for i in range(0, len(switches), per_spine)]
    spines = [
        Switch(name=f"spine{i}", level=1, switches=tuple(leaf.name for leaf in group)) for i, group in enumerate(groups)
    ]
    root = Switch(name="root", level=2, switches=tuple(spine.name for spine in spines))
    return Topology(
        nodes=tuple(machine_node(HGX, name) for name in order), switches=(*switches, *spines, root), source="test"
    )


def interleaved(count: int) -> Topology:
    names = [f"n{i:02d}" for i in range(count)]
    return tree([names[::2], names[1::2]], names)


def uneven() -> Topology:
    names = [f"n{i:02d}" for i in range(16)]
    shuffled = random.Random(3).sample(names, len(names))
    return tree([shuffled[:7], shuffled[7:12], shuffled[12:]], names)


def blocks_of_18() -> Topology:
    """Trays of two blocks, names dealt out in turn."""
    machine = load_machine("gb200-nvl72")
    names = [f"t{i:02d}" for i in range(36)]
    blocks = (Block(name="b1", nodes=tuple(names[::2])), Block(name="b2", nodes=tuple(names[1::2])))
    return Topology(nodes=tuple(machine_node(machine, name) for name in names), blocks=blocks, source="test")


@pytest.mark.parametrize(
    ("topology", "per_node", "degrees"),
    [
        (interleaved(8), 8, ParallelDegrees(pp=2, dp=4, tp=8)),
        (interleaved(8), 8, ParallelDegrees(dp=8, tp=8)),
        (interleaved(8), 8, ParallelDegrees(dp=16, tp=4, ep=8)),
        (uneven(), 8, ParallelDegrees(pp=4, dp=4, tp=8)),
        (uneven(), 8, ParallelDegrees(pp=2, dp=8, sp=2, tp=4)),
        (blocks_of_18(), 4, ParallelDegrees(pp=6, dp=6, tp=4)),
        (blocks_of_18(), 4, ParallelDegrees(pp=2, dp=9, tp=8)),
    ],
)
def test_cheaper_than_the_order_of_the_names(topology: Topology, per_node: int, degrees: ParallelDegrees) -> None:
    placed, plain = compare(degrees, topology, per_node)
    assert placed.total < plain.total


def test_blocks_of_one_larger_block_are_neighbours() -> None:
    """Four stages need two blocks: two that lie in one larger block, not two that are next by name."""
    names = [f"n{i}" for i in range(8)]
    blocks = tuple(Block(name=f"b{i}", nodes=(names[i], names[i + 4])) for i in range(4))
    pairs = tuple(Block(name=f"b{i},b{i + 2}", nodes=blocks[i].nodes + blocks[i + 2].nodes) for i in range(2))
    nodes = tuple(Node(name=name, gpus=tuple(Gpu(index=i) for i in range(8))) for name in names)
    topology = Topology(nodes=nodes, blocks=blocks, aggregated_blocks=pairs, source="test")
    degrees = ParallelDegrees(pp=4, dp=2, tp=8)
    placed, _ = compare(degrees, topology, 8)
    # Of each pipeline one link leaves a block, and none a larger one.
    assert placed.leaving("pp", Level.LEAF) == 16
    assert placed.leaving("pp", Level.SPINE) == 0
    without = topology.model_copy(update={"aggregated_blocks": None})
    order = [node.name for node in place(degrees, without, 8)[0].nodes]
    blind = topology.model_copy(update={"nodes": tuple(nodes[int(name[1:])] for name in order)})
    assert placement_cost(degrees, blind, place(degrees, without, 8)[1]).leaving("pp", Level.SPINE) > 0


def test_order_of_the_names_stays_where_nothing_is_to_gain() -> None:
    names = [f"n{i}" for i in range(8)]
    topology = tree([names[:4], names[4:]], names)
    degrees = ParallelDegrees(dp=8, tp=8)
    placed, plain = compare(degrees, topology, 8)
    assert placed.total == plain.total
    assert [node.name for node in place(degrees, topology, 8)[0].nodes] == names


def test_pipelines_stay_under_a_leaf_as_far_as_leaves_hold_them() -> None:
    """Leaves of 7, 5 and 4 hold 3 pipelines of 4 nodes; the fourth takes the 3 and 1 nodes left: one link out."""
    degrees = ParallelDegrees(pp=4, dp=4, tp=8)
    placed, plain = compare(degrees, uneven(), 8)
    assert placed.leaving("pp", Level.LEAF) == 8
    assert plain.leaving("pp", Level.LEAF) > 8


def test_units_that_share_a_spine_follow_each_other() -> None:
    names = [f"n{i:02d}" for i in range(16)]
    topology = tree([names[0:4], names[8:12], names[4:8], names[12:16]], names)
    placed, plain = compare(ParallelDegrees(dp=16, tp=8), topology, 8)
    assert placed.leaving("dp", Level.SPINE) == 16
    assert plain.leaving("dp", Level.SPINE) == 32


def test_groups_of_experts_stay_under_a_leaf() -> None:
    placed, plain = compare(ParallelDegrees(pp=2, dp=4, tp=8, ep=2), interleaved(8), 8)
    assert placed.leaving("ep", Level.LEAF) == 0 < plain.leaving("ep", Level.LEAF)


def test_tp_over_trays_stays_in_an_nvlink_domain() -> None:
    topology = blocks_of_18().model_copy(
        update={"domains": tuple(NvlinkDomain(name=b.name, nodes=b.nodes) for b in blocks_of_18().blocks or ())}
    )
    placed, plain = compare(ParallelDegrees(dp=18, tp=8), topology, 4)
    assert placed.leaving("tp", Level.ISLAND) == 0 < plain.leaving("tp", Level.ISLAND)


def test_traffic_decides_between_pipelines_and_data_parallel() -> None:
    """Two leaves of 4: either the pipelines of 4 stages stay inside, or the dp pairs do."""
    topology, degrees = interleaved(8), ParallelDegrees(pp=4, dp=2, tp=8)
    by_rank, _ = compare(degrees, topology, 8)
    much_data, _ = compare(degrees, topology, 8, Traffic(pp=1, dp=100))
    assert by_rank.leaving("pp", Level.LEAF) == 0 < by_rank.leaving("dp", Level.LEAF)
    assert much_data.leaving("dp", Level.LEAF) == 0 < much_data.leaving("pp", Level.LEAF)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_invariants(data: st.DataObject) -> None:
    """Every rank once; groups of an axis have its size; never dearer than names; the same again."""
    pp, sp, tp = (data.draw(st.sampled_from(sizes)) for sizes in ((1, 2, 3, 4), (1, 2), (1, 2, 4, 8)))
    count = data.draw(st.integers(1, 6)) * pp
    if count * 8 % (pp * sp * tp):
        sp = 1
    dp = count * 8 // (pp * sp * tp)
    ep = data.draw(st.sampled_from([e for e in (1, 2, 4) if dp * sp % e == 0]))
    degrees = ParallelDegrees(pp=pp, dp=dp, sp=sp, tp=tp, ep=ep)
    names = [f"n{i}" for i in range(count)]
    order = data.draw(st.permutations(names))
    cuts = sorted(data.draw(st.sets(st.integers(1, count), max_size=4)))
    leaves = [order[a:b] for a, b in zip([0, *cuts], [*cuts, count], strict=True) if a < b]
    listed = data.draw(st.sampled_from([leaves, leaves[1:] or leaves]))
    topology = tree(listed, data.draw(st.permutations(names)))

    ordered, places = place(degrees, topology, 8)
    assert sorted(node.name for node in ordered.nodes) == sorted(names)
    assert [spot.rank for spot in places] == list(range(degrees.world_size))
    assert {(spot.node, spot.gpu) for spot in places} == {(node, gpu) for node in range(count) for gpu in range(8)}
    for axis, size in ((Axis.PP, pp), (Axis.DP, dp), (Axis.SP, sp), (Axis.TP, tp)):
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(degrees.world_size):
            others = tuple(at for name, at in degrees.coordinates(rank).items() if name is not axis)
            groups.setdefault(others, []).append(rank)
        assert {len(members) for members in groups.values()} == {size}
    cost = placement_cost(degrees, ordered, places)
    assert cost.leaving("tp", Level.ISLAND) == 0 if tp > 1 else "tp" not in cost.links
    assert cost.total <= compare(degrees, topology, 8)[1].total
    assert place(degrees, topology, 8) == (ordered, places)
