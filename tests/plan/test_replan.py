"""The same run on other nodes: batch and data order stay, fixed values stay where they can."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpjob.cli.app import app
from hpjob.core.errors import NothingFitsError, UserInputError
from hpjob.core.run_dir import RunDir
from hpjob.plan.legality import layout_of, problems, unsupported_by_runtime
from hpjob.plan.model import Plan
from hpjob.plan.planner import make_plan
from hpjob.plan.replan import Replan, replan
from hpjob.plan.shape import shape_of
from hpjob.recipe.load import dump_recipe, load_recipe
from hpjob.recipe.model import Recipe
from hpjob.topology.load import dump_topology, load_machine, local_topology, machine_topology
from hpjob.topology.model import Topology


def _nodes(count: int, machine: str = "dgx-a100-80g") -> Topology:
    return machine_topology(load_machine(machine), count)


def _on(recipe: Recipe, before: int, after: int) -> Replan:
    return replan(recipe, _nodes(after), previous=make_plan(recipe, _nodes(before)))


def _is_whole(plan: Plan, recipe: Recipe) -> bool:
    world = plan.num_nodes * plan.gpus_per_node
    batch = plan.degrees.dp * plan.pipeline.num_microbatches * plan.pipeline.microbatch_size
    return (
        plan.degrees.world_size == world
        and batch == recipe.training.global_batch_size
        and not problems(shape_of(recipe.model), layout_of(plan), world)
        and not unsupported_by_runtime(plan)
    )


@pytest.mark.parametrize("after", [3, 5, 6, 8])
def test_fewer_or_more_nodes_keep_batch_and_sequence(after: int) -> None:
    recipe = load_recipe("70b", [])
    found = _on(recipe, 4, after)
    assert _is_whole(found.plan, recipe)
    assert (found.plan.global_batch_size, found.plan.seq_length) == (
        found.previous.global_batch_size,
        found.previous.seq_length,
    )
    assert found.checkpoint_loads
    assert found.notes == ()
    assert found.old_step_s is not None
    assert (found.new_step_s > found.old_step_s) == (after < 4)
    assert Replan.model_validate_json(found.model_dump_json()) == found


def test_degrees_that_still_divide_are_kept_and_others_are_released_one_by_one() -> None:
    fixed = [f"parallel.{name}" for name in ("tp_size=4", "pp_size=4", "zero_stage=1", "microbatch_size=1")]
    recipe = load_recipe("70b", fixed)
    same = _on(recipe, 4, 8)
    assert (same.plan.degrees.tp, same.plan.degrees.pp, same.notes) == (4, 4, ())
    fewer = _on(recipe, 4, 3)
    assert _is_whole(fewer.plan, recipe)
    assert fewer.plan.degrees.tp == 4, "pp is given up before tp"
    assert fewer.plan.zero_stage == 1
    assert fewer.plan.pipeline.microbatch_size == 1
    assert fewer.notes == (f"the recipe's pp_size 4 does not fit 24 ranks: now {fewer.plan.degrees.pp}",)
    assert (fewer.recipe.parallel.tp_size, fewer.recipe.parallel.pp_size) == (4, "auto")


def test_batches_that_no_longer_multiply_are_released_before_anything_else() -> None:
    fixed = ["parallel.tp_size=4", "parallel.pp_size=4", "parallel.num_microbatches=32", "parallel.microbatch_size=1"]
    fixed.append("parallel.sp_size=1")
    recipe = load_recipe("70b", [*fixed, "training.global_batch_size=64"])
    found = _on(recipe, 4, 8)
    assert (found.plan.degrees.tp, found.plan.degrees.pp, found.plan.degrees.dp) == (4, 4, 4)
    assert (found.plan.pipeline.num_microbatches, found.plan.pipeline.microbatch_size) == (16, 1)
    assert found.notes == ("the recipe's num_microbatches 32 does not fit 64 ranks with a global batch of 64: now 16",)


def test_virtual_nodes_of_this_host_are_planned_like_others() -> None:
    recipe = load_recipe("tiny", [])
    previous = make_plan(recipe, local_topology(2, 4))
    found = replan(recipe, local_topology(3, 4), previous=previous)
    assert found.plan.degrees.world_size == 12
    assert found.plan.gpus_per_node == 4
    assert _is_whole(found.plan, recipe)


def test_another_batch_or_sequence_is_another_run() -> None:
    recipe = load_recipe("7b", [])
    previous = make_plan(recipe, _nodes(2))
    for change in ("training.global_batch_size=32", "data.seq_length=512"):
        with pytest.raises(UserInputError, match="the order of its data would change"):
            replan(load_recipe("7b", [change]), _nodes(2), previous=previous)


def test_when_nothing_fits_the_nearest_node_counts_are_named() -> None:
    recipe = load_recipe("70b", ["parallel.cpu_offload=false"])
    previous = make_plan(recipe, _nodes(4))
    with pytest.raises(NothingFitsError) as caught:
        replan(recipe, _nodes(1), previous=previous)
    assert "GiB a GPU" in caught.value.message
    assert caught.value.hint == "stay on 4 nodes"
    with pytest.raises(NothingFitsError) as caught:
        replan(recipe, _nodes(83), previous=previous, gpus_per_node=1)
    assert caught.value.hint.startswith("use --nodes 8")


def _run_folder(folder: Path, recipe: Recipe, topology: Topology) -> Path:
    run = RunDir(folder / "mine")
    run.path.mkdir()
    run.recipe.write_text(dump_recipe(recipe))
    run.topology.write_text(dump_topology(topology))
    run.plan.write_text(make_plan(recipe, topology).model_dump_json())
    run.script.write_text("#!/bin/bash\n")
    return run.path


def test_command_plans_a_run_anew(tmp_path: Path) -> None:
    folder = _run_folder(tmp_path, load_recipe("7b", []), _nodes(2))
    runner = CliRunner()
    shown = runner.invoke(app, ["plan", "--from", str(folder), "--nodes", "3", "--machine", "dgx-a100-80g"])
    assert shown.exit_code == 0, shown.output
    assert "7b: 2 x 8 ranks before, 3 x 8 now" in shown.stdout
    assert "checkpoint" in shown.stdout
    as_json = runner.invoke(app, ["plan", "--from", str(folder), "-N", "3", "--machine", "dgx-a100-80g", "--json"])
    found = Replan.model_validate_json(as_json.stdout)
    assert (found.previous.num_nodes, found.plan.num_nodes, found.checkpoint_loads) == (2, 3, True)
    both = runner.invoke(app, ["plan", "--from", str(folder), "--recipe", "7b", "--nodes", "3"])
    assert isinstance(both.exception, UserInputError)
