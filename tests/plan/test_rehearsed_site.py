"""Rehearsed times in a site file: plans are made from them and say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpjob.core.errors import EnvironmentProblemError, UserInputError
from hpjob.plan.model import Plan
from hpjob.plan.planner import make_plan
from hpjob.plan.rehearsal import RankRehearsal, StageTiming
from hpjob.plan.rehearsed_site import add_to_site, layers_of, refuse_site
from hpjob.plan.site import load_site
from hpjob.recipe.load import load_recipe
from hpjob.recipe.model import Recipe
from hpjob.topology.load import load_machine, machine_topology

FIXED = ("pp_size=2", "tp_size=8", "sp_size=1", "pp_style=1f1b", "microbatch_size=1", "zero_stage=1")
OPTIONS = [f"parallel.{value}" for value in (*FIXED, "sequence_parallelism_mode=split_gather")]
PLAIN = "parallel.gradient_checkpoint_config.policy=none"


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe("13b", [*OPTIONS, PLAIN])


def plan_of(recipe: Recipe, site: str | None = None) -> Plan:
    return make_plan(recipe, machine_topology(load_machine("hgx-h100"), 4), site=site)


def report(plan: Plan, stage: int, *, forward_s: float = 0.02, backward_s: float = 0.04) -> RankRehearsal:
    layers = plan.pipeline.layers_per_stage[stage]
    timing = StageTiming(stage=stage, num_layers=layers, forward_s=forward_s, backward_s=backward_s)
    return RankRehearsal(
        plan_summary=plan.summary,
        rank=16 * stage,
        pp_rank=stage,
        world_size=32,
        device="NVIDIA H100",
        weights_gib=1,
        gradients_gib=1,
        optimizer_gib=1,
        peak_gib=4,
        stages=(timing,),
        optimizer_s=0.1,
        host_s=0.01,
        num_microbatches=8,
    )


def test_slower_rehearsed_layers_make_the_plan_slower_and_it_says_rehearsed(recipe: Recipe, tmp_path: Path) -> None:
    plan = plan_of(recipe)
    assert plan.basis == "estimated"
    steps = []
    for factor in (1.0, 2.0):
        file = str(tmp_path / f"{factor}.yaml")
        reports = [report(plan, stage, forward_s=0.2 * factor, backward_s=0.4 * factor) for stage in (0, 1)]
        add_to_site(file, layers_of(plan, recipe, reports), "13b on NVIDIA H100")
        rehearsed = plan_of(recipe, file)
        assert rehearsed.basis == "rehearsed" and "13b on NVIDIA H100" in rehearsed.basis_note
        steps.append(rehearsed.time.compute_s)
    assert steps[1] == pytest.approx(2 * steps[0], rel=0.15)


def test_the_last_stage_is_used_least(recipe: Recipe) -> None:
    plan = plan_of(recipe)
    (layer,) = layers_of(plan, recipe, [report(plan, 0), report(plan, 1, forward_s=9.0)])
    assert layer.forward_s == pytest.approx(0.02 / plan.pipeline.layers_per_stage[0])
    with pytest.raises(UserInputError, match="only the last stage"):
        layers_of(plan, recipe, [report(plan, 1)])


def test_a_recomputed_forward_is_no_part_of_the_backward() -> None:
    recipe = load_recipe("13b", [*OPTIONS, PLAIN.replace("none", "full")])
    plan = plan_of(recipe)
    assert plan.recompute == "full" and plan.recompute_every_kth_layer == 1
    (layer,) = layers_of(plan, recipe, [report(plan, 0, forward_s=0.02, backward_s=0.06)])
    assert layer.backward_s == pytest.approx(0.04 / plan.pipeline.layers_per_stage[0])


def test_a_site_file_keeps_what_others_put_there(recipe: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text("version: 1\nlinks: {island_gb_s: 340}\n", encoding="utf-8")
    plan = plan_of(recipe)
    for seconds in (0.02, 0.03):
        add_to_site(str(file), layers_of(plan, recipe, [report(plan, 0, forward_s=seconds)]), "again")
    site = load_site(file)
    assert site.links.island_gb_s == 340 and site.note == "again"
    assert [layer.forward_s for layer in site.layers] == [pytest.approx(0.03 / plan.pipeline.layers_per_stage[0])]


def test_what_cannot_be_told_is_refused_before_it_runs(recipe: Recipe, tmp_path: Path) -> None:
    plan = plan_of(recipe)
    with pytest.raises(UserInputError, match="recompute parts"):
        refuse_site("site.yaml", plan.model_copy(update={"recompute": "full", "recompute_every_kth_layer": 2}))
    broken = tmp_path / "site.yaml"
    broken.write_text("version: 1\nlayer: []\n", encoding="utf-8")
    with pytest.raises(UserInputError, match="layer"):
        refuse_site(str(broken), plan)
    with pytest.raises(EnvironmentProblemError, match="site file"):
        refuse_site(str(broken / "below" / "site.yaml"), plan)  # its folder would lie in a file
