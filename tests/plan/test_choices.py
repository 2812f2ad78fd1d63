"""Other links, another choice; and the explanation names the links that made the difference."""

import pytest

from hpjob.plan.legality import layout_of
from hpjob.plan.model import Plan
from hpjob.plan.planner import make_plan, make_problem
from hpjob.recipe.load import load_recipe
from hpjob.topology.load import load_machine, machine_topology
from hpjob.topology.model import Island, Topology


def _nodes(machine: str, count: int) -> Topology:
    return machine_topology(load_machine(machine), count)


def _with_a_dead_link(topology: Topology) -> Topology:
    """GPUs 0 and 1 of the first node no longer reach each other over NVLink."""
    cliques = (tuple(range(1, 8)), (0, *range(2, 8)))
    island = Island(kind="nvlink", gpus=tuple(range(8)), all_to_all=False, cliques=cliques)
    first = topology.nodes[0].model_copy(update={"islands": (island,)})
    return topology.model_copy(update={"nodes": (first, *topology.nodes[1:])})


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    """70b on 32 GPUs of different machines."""
    topologies = {
        "dgx-a100-80g": _nodes("dgx-a100-80g", 4),
        "gb200-nvl72": _nodes("gb200-nvl72", 8),
        "pcie-l40s": _nodes("pcie-l40s", 4),
    }
    return {name: make_plan(load_recipe("70b", []), topology) for name, topology in topologies.items()}


@pytest.fixture(scope="module")
def expert_plans() -> dict[str, Plan]:
    """mixtral-8x7b on 32 GPUs, of which one pair may have lost its link."""
    topologies = {
        "dgx-a100-80g": _nodes("dgx-a100-80g", 4),
        "hgx-h100": _nodes("hgx-h100", 4),
        "dead link": _with_a_dead_link(_nodes("hgx-h100", 4)),
    }
    return {name: make_plan(load_recipe("mixtral-8x7b", []), topology) for name, topology in topologies.items()}


def _reason(plan: Plan, start: str) -> str:
    return next(reason for reason in plan.reasons if reason.startswith(start))


def test_every_machine_gets_its_own_layout(plans: dict[str, Plan]) -> None:
    usual = layout_of(plans["dgx-a100-80g"])
    for name in ("gb200-nvl72", "pcie-l40s"):
        other = layout_of(plans[name])
        assert (other[:3], other.style) != (usual[:3], usual.style), name


def test_a_rack_of_72_is_one_island(plans: dict[str, Plan]) -> None:
    plan = plans["gb200-nvl72"]
    assert "72 GPUs reach each other over NVLink at 900 GB/s, across 18 nodes" in _reason(plan, "links:")
    assert "over NVLink" in " ".join(plan.reasons)


def test_experts_exchange_past_a_pair_without_a_link(expert_plans: dict[str, Plan]) -> None:
    """In an exchange every pair sends, so one without a link holds up all: whole nodes exchange among their 8 GPUs."""
    dead, whole = expert_plans["dead link"], expert_plans["hgx-h100"]
    assert layout_of(whole)[:3] == layout_of(expert_plans["dgx-a100-80g"])[:3] != layout_of(dead)[:3]
    assert whole.degrees.ep == 8 and whole.degrees.tp == 1
    assert dead.time.step_s > 1.02 * whole.time.step_s
    assert "the 8 of a node are no such group" in _reason(dead, "links:")
    assert "8 GPUs reach each other over NVLink" in _reason(whole, "links:")
    usual = next(plan for plan in dead.runners_up if plan.summary.startswith("tp 1 · pp 2 · dp 8 · sp 2 · ep 8"))
    assert "slower" in usual.why_not
    # The two are in no tp pair and, ep going in steps of tp, in no exchange.
    first = [spot.gpu for spot in dead.placement if spot.node == 0]
    assert dead.degrees.tp == 2 and (first.index(0) - first.index(1)) % 2 == 1
    assert first.index(0) // 2 != first.index(1) // 2


def test_a_dead_link_keeps_tp_in_groups_and_pipelines_off_the_pair() -> None:
    """Nothing of this layout needs the pair: the order of the GPUs keeps it apart."""
    topologies = _nodes("hgx-h100", 4), _with_a_dead_link(_nodes("hgx-h100", 4))
    whole, plan = (make_plan(load_recipe("70b", []), topology) for topology in topologies)
    assert any("groups of 4, not 8; tp is kept inside such groups" in warning for warning in plan.warnings)
    assert "tp above 4 would leave the island of 4 GPUs" in _reason(plan, "tp ")
    assert layout_of(plan) == layout_of(whole)
    assert plan.time == whole.time
    first = [spot.gpu for spot in plan.placement if spot.node == 0]
    assert abs(first.index(0) - first.index(1)) not in {1, 2, 4}


def test_without_nvlink_tp_loses_by_its_traffic_over_pcie(plans: dict[str, Plan]) -> None:
    plan = plans["pcie-l40s"]
    assert plan.degrees.tp <= plans["dgx-a100-80g"].degrees.tp < 8
    assert "over PCIe at 22 GB/s" in _reason(plan, "links:")
    # Fewer ranks would be faster, were there the memory.
    assert "tp 2 (" in _reason(plan, "tp ") and "would be faster but needs" in _reason(plan, "tp ")


def test_every_axis_has_its_reason_and_the_changes_are_computed(plans: dict[str, Plan]) -> None:
    for plan in plans.values():
        for axis in ("tp", "pp", "dp", "zero", "microbatch", "recompute"):
            assert _reason(plan, f"{axis} ")
        assert plan.binding.startswith(("memory binds", "time binds"))
        assert plan.basis_note.startswith("the interval is 2 times")
        for rival in plan.runners_up:
            assert rival.step_s is not None
            lost = sum(rival.lost_s.values())
            assert lost == pytest.approx(rival.step_s - plan.time.step_s, abs=0.01 * plan.time.step_s)
    changes = {change.change: change for change in plans["dgx-a100-80g"].changes}
    more, fewer = changes["8 nodes"], changes["3 nodes"]
    assert more.percent is not None and fewer.percent is not None
    assert more.percent < -40 < 0 < fewer.percent
    assert any("GiB more a GPU" in name or "recompute" in name for name in changes)


def test_one_node_more_and_twice_the_nodes_are_told_once() -> None:
    changes = [
        change.change
        for change in make_plan(load_recipe("tiny", ["parallel.num_microbatches=auto"]), _nodes("cpu", 1)).changes
    ]
    assert changes.count("2 nodes") == 1


def test_more_nodes_as_promised(plans: dict[str, Plan]) -> None:
    promised = next(change for change in plans["dgx-a100-80g"].changes if change.change == "8 nodes")
    planned = make_plan(load_recipe("70b", []), _nodes("dgx-a100-80g", 8))
    assert promised.step_s is not None
    assert planned.time.step_s <= promised.step_s * 1.001
    assert planned.time.step_s > promised.step_s * 0.9


def test_what_the_loss_is_named_after_is_where_most_time_goes(plans: dict[str, Plan]) -> None:
    for plan in plans.values():
        for rival in plan.runners_up:
            if "slower:" not in rival.why_not:
                continue
            kind = max(rival.lost_s, key=lambda name: rival.lost_s[name])
            words = {"tp_comm": "traffic over", "dp_comm": "dp traffic", "pp_comm": "transfers between stages"}
            assert words.get(kind, kind) in rival.why_not


def test_flash_attention_switched_off_needs_the_score_matrix() -> None:
    fixed = [f"parallel.{name}=1" for name in ("tp_size", "pp_size", "sp_size", "microbatch_size")]
    fixed += ["parallel.zero_stage=3", "parallel.gradient_checkpoint_config.policy=none"]
    recipe = load_recipe("7b", [*fixed, "parallel.enable_flash_attention=false"])
    plain = make_problem(load_recipe("7b", fixed), _nodes("hgx-h200", 1))
    off = make_problem(recipe, _nodes("hgx-h200", 1))
    plan = make_plan(load_recipe("7b", fixed), _nodes("hgx-h200", 1))
    layout = layout_of(plan)
    scores = layout.tokens * layout.seq * 32 * 32 * 1.5 * 2 / 2**30
    more = off.runtime.worst_gib(layout._replace(flash=False)) - plain.runtime.worst_gib(layout)
    assert more == pytest.approx(scores * 1.03, rel=0.02)
