"""All-to-all groups of nodes with whole, split and broken islands."""

from itertools import combinations

from hpjob.plan.planner import make_plan
from hpjob.recipe.load import load_recipe
from hpjob.topology.groups import all_to_all_groups, largest_group_size
from hpjob.topology.load import load_machine, machine_topology
from hpjob.topology.model import Gpu, Island, Link, Node


def _node(*islands: tuple[int, ...], count: int = 8, dead: tuple[tuple[int, int], ...] = ()) -> Node:
    return Node(
        name="n",
        gpus=tuple(Gpu(index=index) for index in range(count)),
        islands=tuple(Island(kind="nvlink", gpus=gpus, all_to_all=True) for gpus in islands),
        links=tuple(Link(a=a, b=b, linked=False) for a, b in dead) or None,
    )


def test_whole_quads_and_bridged_pairs() -> None:
    assert largest_group_size(_node(tuple(range(8)))) == 8
    assert largest_group_size(_node((0, 1, 2, 3), (4, 5, 6, 7))) == 4
    assert all_to_all_groups(_node((0, 2), (1, 3), count=4), 2) == [(0, 2), (1, 3)]
    assert largest_group_size(_node()) == 1


def test_one_dead_link_splits_the_island_around_it() -> None:
    node = _node(tuple(range(8)), dead=((1, 2),))
    assert largest_group_size(node) == 4
    groups = all_to_all_groups(node, 4)
    assert groups is not None
    assert not any({1, 2} <= set(group) for group in groups)
    assert sorted(gpu for group in groups for gpu in group) == list(range(8))


def test_a_gpu_without_links_leaves_no_group() -> None:
    dead = tuple(pair for pair in combinations(range(8), 2) if 7 in pair)
    assert largest_group_size(_node(tuple(range(8)), dead=dead)) == 1


def test_planner_keeps_tp_inside_what_is_linked_and_says_so() -> None:
    topology = machine_topology(load_machine("hgx-h100"), 1)
    broken = topology.nodes[0].model_copy(update={"links": (Link(a=1, b=2, linked=False),)})
    recipe = load_recipe("llama3-8b", ["training.global_batch_size=16", "parallel.tp_size=auto"])
    plan = make_plan(recipe, topology.model_copy(update={"nodes": (broken,)}))
    assert plan.degrees.tp <= 4
    assert any("all linked in groups of 4, not 8" in warning for warning in plan.warnings)
