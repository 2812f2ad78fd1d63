"""Placement: every rank once, tp groups inside islands, pipeline neighbours under one leaf."""

from hypothesis import given, settings
from hypothesis import strategies as st

from hpjob.plan.model import Axis, ParallelDegrees
from hpjob.plan.placement import place
from hpjob.topology.load import load_machine, machine_topology
from hpjob.topology.model import Gpu, Island, Node, Switch, Topology


def _two_leaves(per_leaf: int) -> Topology:
    """Nodes whose given order alternates between the leaves, as an alphabetical list may do."""
    base = machine_topology(load_machine("dgx-a100-80g"), 2 * per_leaf)
    names = [node.name for node in base.nodes]
    leaves = (Switch(name="a", level=0, nodes=tuple(names[::2])), Switch(name="b", level=0, nodes=tuple(names[1::2])))
    return base.model_copy(update={"switches": leaves})


def test_pipeline_neighbours_share_a_leaf() -> None:
    topology = _two_leaves(4)
    degrees = ParallelDegrees(pp=4, dp=2, tp=8)
    ordered, places = place(degrees, topology, 8)
    assert topology.switches is not None
    leaf_of = {name: leaf.name for leaf in topology.switches for name in leaf.nodes}
    leaves_of_pipeline: dict[tuple[int, int], set[str]] = {}
    for rank, spot in enumerate(places):
        coordinates = degrees.coordinates(rank)
        key = (coordinates[Axis.DP], coordinates[Axis.TP])
        leaves_of_pipeline.setdefault(key, set()).add(leaf_of[ordered.nodes[spot.node].name])
    assert all(len(leaves) == 1 for leaves in leaves_of_pipeline.values())
    # Negative control: the order given mixes leaves inside each pipeline.
    given_order = [leaf_of[node.name] for node in topology.nodes]
    assert len({given_order[stage * 2] for stage in range(4)}) == 1
    assert len(set(given_order[:2])) == 2


def test_bridged_pairs_become_neighbours() -> None:
    gpus = tuple(Gpu(index=index) for index in range(4))
    islands = tuple(Island(kind="nvlink", gpus=pair, all_to_all=True) for pair in ((0, 2), (1, 3)))
    topology = Topology(nodes=(Node(name="n", gpus=gpus, islands=islands),), source="test")
    _, places = place(ParallelDegrees(dp=2, tp=2), topology, 4)
    assert [spot.gpu for spot in places] == [0, 2, 1, 3]


@settings(deadline=None, max_examples=25)
@given(
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2, 3]),
    tp=st.sampled_from([1, 2, 4, 8]),
)
def test_every_rank_has_its_own_gpu_and_tp_stays_in_a_node(pp: int, dp: int, tp: int) -> None:
    degrees = ParallelDegrees(pp=pp, dp=dp * 8 // tp, tp=tp)
    nodes = degrees.world_size // 8
    topology = _two_leaves(nodes) if nodes % 2 == 0 else machine_topology(load_machine("dgx-a100-80g"), nodes)
    topology = topology.model_copy(update={"nodes": topology.nodes[:nodes]})
    ordered, places = place(degrees, topology, 8)
    assert {node.name for node in ordered.nodes} == {node.name for node in topology.nodes}
    assert len({(spot.node, spot.gpu) for spot in places}) == degrees.world_size
    assert [spot.rank for spot in places] == list(range(degrees.world_size))
    groups: dict[tuple[int, ...], set[int]] = {}
    for rank, spot in enumerate(places):
        c = degrees.coordinates(rank)
        groups.setdefault((c[Axis.PP], c[Axis.DP], c[Axis.SP]), set()).add(spot.node)
    assert all(len(members) == 1 for members in groups.values())
    assert place(degrees, topology, 8) == (ordered, places)
