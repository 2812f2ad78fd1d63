"""Order of GPUs inside unusual nodes, and that the notes name what is unusual."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpjob.plan.model import ParallelDegrees
from hpjob.plan.placement import place
from hpjob.plan.placement_cost import Level, placement_cost
from hpjob.topology.groups import linked_pairs
from hpjob.topology.model import Gpu, Island, Link, Nic, Node, Topology

QUADS = ((0, 1, 2, 3), (4, 5, 6, 7))


def node(name: str, *islands: Island, count: int = 8, **fields: object) -> Node:
    return Node.model_validate(
        {"name": name, "gpus": [Gpu(index=i) for i in range(count)], "islands": islands} | fields
    )


def whole(*gpus: int) -> Island:
    return Island(kind="nvlink", gpus=gpus, all_to_all=True)


def order(node: Node, degrees: ParallelDegrees, count: int = 8) -> tuple[list[int], tuple[str, ...]]:
    ordered, places = place(degrees, Topology(nodes=(node,), source="test"), count)
    return [spot.gpu for spot in places], ordered.notes


def test_cube_mesh_tp_four_sits_on_the_quads() -> None:
    quads = ((0, 1, 4, 5), (2, 3, 6, 7))
    mesh = Island(kind="nvlink", gpus=tuple(range(8)), all_to_all=False, cliques=quads)
    gpus, notes = order(node("v", mesh), ParallelDegrees(dp=2, tp=4))
    assert gpus == [0, 1, 4, 5, 2, 3, 6, 7]
    assert any("all-to-all sets are 0-1-4-5 and 2-3-6-7" in note for note in notes)
    _, notes = order(node("v", mesh), ParallelDegrees(tp=8))
    assert any(note.startswith("v: no 1 tp groups of 8 GPUs in which all pairs are linked") for note in notes)


def test_ranks_on_cores_have_no_links_to_miss() -> None:
    cores = node("c").model_copy(update={"gpus": tuple(Gpu(index=i, model="cpu") for i in range(8))})
    assert order(cores, ParallelDegrees(dp=2, tp=4))[1] == ()
    assert any("all pairs are linked" in note for note in order(node("p"), ParallelDegrees(dp=2, tp=4))[1])


def test_bridged_pairs_that_are_no_neighbours() -> None:
    gpus, notes = order(node("b", whole(0, 2), whole(1, 3), count=4), ParallelDegrees(dp=2, tp=2), 4)
    assert gpus == [0, 2, 1, 3]
    assert notes == ("b: 2 separate islands: 0,2; 1,3",)


def test_gpu_with_dead_links_stays_out_of_tp_groups() -> None:
    sick = node("d", whole(0, 1, 2, 4, 5, 6, 7))
    gpus, notes = order(sick, ParallelDegrees(dp=2, tp=2), 4)
    assert 3 not in gpus
    assert any("GPU 3 has no link" in note for note in notes)
    gpus, notes = order(sick, ParallelDegrees(dp=2, tp=4))
    assert gpus[:4] == [0, 1, 2, 4] or 3 in gpus[4:]
    assert any("no 2 tp groups of 4" in note for note in notes)


def test_link_seen_down_inside_an_island() -> None:
    down = (Link(a=0, b=1, linked=False),)
    gpus, _ = order(node("l", whole(*range(4)), count=4, links=down), ParallelDegrees(dp=2, tp=2), 4)
    assert gpus == [0, 2, 1, 3]


@pytest.mark.parametrize(
    ("fields", "words"), [({"display": True}, "is a display card"), ({"mig": ("1g.10gb",)}, "is sliced (1g.10gb)")]
)
def test_cards_that_cannot_train_are_left_out_and_named(fields: dict[str, object], words: str) -> None:
    gpus = [Gpu.model_validate({"index": i} | (fields if i == 2 else {})) for i in range(5)]
    odd = Node(name="o", gpus=tuple(gpus), islands=(whole(0, 1, 3, 4),))
    found, notes = order(odd, ParallelDegrees(tp=4), 4)
    assert found == [0, 1, 3, 4]
    assert f"o: GPU 2 {words}, left out" in notes
    found, notes = order(odd, ParallelDegrees(dp=5), 5)
    assert sorted(found) == [0, 1, 2, 3, 4]
    assert any(f"GPU 2 {words}, but all 5 are needed" in note for note in notes)


def test_drained_nodes_are_named_in_one_line() -> None:
    nodes = tuple(node(f"n{i}", whole(*range(8)), state="IDLE+DRAIN" if i else "IDLE") for i in range(3))
    ordered, _ = place(ParallelDegrees(dp=3, tp=8), Topology(nodes=nodes, source="test"), 8)
    assert ordered.notes == ("n[1-2] (2 nodes): Slurm calls the node IDLE+DRAIN",)


def test_equal_places_share_a_rail_where_cables_differ() -> None:
    """The second node's NICs run against its GPUs; members of a dp group are on one rail all the same."""
    nodes = []
    for name, rail in (("a", lambda gpu: gpu), ("b", lambda gpu: 7 - gpu)):
        nics = [Nic(name=f"m{gpu}", near_gpus=(gpu,), rail=rail(gpu), rail_from="switch port") for gpu in range(8)]
        nodes.append(node(name, whole(*range(8)), nics=nics))
    topology, degrees = Topology(nodes=tuple(nodes), source="test"), ParallelDegrees(dp=2, tp=8)
    ordered, places = place(degrees, topology, 8)
    assert [spot.gpu for spot in places[8:]] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert placement_cost(degrees, ordered, places).other_rail == 0


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    order_seed=st.permutations(range(8)),
    tp=st.sampled_from([2, 4, 8]),
)
def test_tp_groups_are_cliques_or_the_plan_says_why_not(sizes: list[int], order_seed: list[int], tp: int) -> None:
    islands, at = [], 0
    for size in sizes:
        members = tuple(sorted(order_seed[at : at + size]))
        at += size
        if len(members) > 1:
            islands.append(whole(*members))
    odd = node("x", *islands)
    degrees = ParallelDegrees(dp=8 // tp, tp=tp)
    ordered, places = place(degrees, Topology(nodes=(odd,), source="test"), 8)
    pairs = linked_pairs(odd)
    groups = [[spot.gpu for spot in places[start : start + tp]] for start in range(0, 8, tp)]
    linked = all((min(a, b), max(a, b)) in pairs for group in groups for a, b in combinations(group, 2))
    assert linked != any("tp groups of" in note and "all pairs are linked" in note for note in ordered.notes)
    assert linked == (placement_cost(degrees, ordered, places).leaving("tp", Level.ISLAND) == 0) or not linked


@pytest.mark.parametrize("pair", [(0, 1), (0, 7), (3, 4)])
@pytest.mark.parametrize("degrees", [ParallelDegrees(tp=4, pp=2), ParallelDegrees(tp=2, pp=4), ParallelDegrees(pp=8)])
def test_a_pair_without_a_link_is_nowhere_a_pair_of_neighbours(pair: tuple[int, int], degrees: ParallelDegrees) -> None:
    cliques = tuple(tuple(gpu for gpu in range(8) if gpu != other) for other in pair)
    sick = node("d", Island(kind="nvlink", gpus=tuple(range(8)), all_to_all=False, cliques=cliques))
    gpus, _ = order(sick, degrees)
    assert sorted(gpus) == list(range(8))
    a, b = sorted(gpus.index(gpu) for gpu in pair)
    assert b - a not in {1, 2, 4, 6, 7}
    assert a // degrees.tp != b // degrees.tp
    _, places = place(degrees, Topology(nodes=(sick,), source="test"), 8)
    links = placement_cost(degrees, Topology(nodes=(sick,), source="test"), places).links
    assert all(counts[Level.ISLAND] == 0 for counts in links.values())
