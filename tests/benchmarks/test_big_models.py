"""Which layouts of whole models are measured, and with how much of the batch."""

import pytest

pytest.importorskip("torch", reason="the benchmarks need the [train] extra")
pytest.importorskip("transformers", reason="the benchmarks need the [train] extra")

from benchmarks.big_models import (
    CHOICE,
    Planner,
    Target,
    Work,
    dense_layouts,
    left_out,
    parity_text,
    shortened,
    targets,
)
from hpjob.core.errors import HpjobError
from hpjob.plan.layout import Layout
from hpjob.plan.planner import make_plan
from hpjob.recipe.load import load_recipe
from hpjob.runtime.parity.case import parse_case
from hpjob.runtime.support import unsupported
from hpjob.topology.load import load_machine, machine_topology


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_every_target_becomes_a_layout_that_runs_and_is_small_enough_for_a_gpu(gpus: int) -> None:
    planner = Planner(gpus, "hgx-h200")
    found = targets(gpus, tiny=False, whole=True)
    assert found[0].name == CHOICE
    for target in found:
        try:
            chosen = planner.choose(target, 0.25)
        except HpjobError as error:
            assert "layouts fit" in error.message and target.place > 0
            continue
        assert chosen.case.world == gpus
        assert unsupported(chosen.case.plan, chosen.case.recipe) == []
        assert chosen.predicted_gib < 141
        assert chosen.share <= 1 and (not target.is_whole or chosen.share == 1)
        assert chosen.case.recipe.model.num_parameters > 5e9


def test_settings_of_a_target_hold() -> None:
    planner = Planner(8, "hgx-h200")
    plans = {t.name: planner.choose(t, 1.0).case.plan for t in targets(8, tiny=False, whole=False)[::-1]}
    assert (plans["pp 8 zbv"].degrees.pp, plans["pp 8 zbv"].pipeline.style) == (8, "zbv")
    assert (plans["sp 8 ring_attn"].degrees.sp, plans["sp 8 ring_attn"].seq_length) == (8, 131072)
    assert (plans["zero 2 dp 8"].zero_stage, plans["zero 2 dp 8"].degrees.dp) == (2, 8)
    assert plans["ep 8"].degrees.ep == 8
    assert plans[CHOICE].global_batch_size == 288
    degrees = {p.degrees for name, p in plans.items() if name.startswith("runner-up")}
    assert len(degrees) == 2 and plans[CHOICE].degrees not in degrees


def test_the_planners_choice_is_that_of_hpjob_plan() -> None:
    """Here a layout with an uneven split is as fast, and only the tie decides for the plain one."""
    machine, recipe = "dgx-a100-80g", load_recipe("7b", [])
    planned = make_plan(recipe, machine_topology(load_machine(machine), 1))
    chosen = Planner(8, machine).choose(Target(work=Work(name="7b", recipe=recipe), name=CHOICE), 1.0).case.plan
    assert chosen.summary == planned.summary
    assert chosen.pipeline.layers_per_stage == planned.pipeline.layers_per_stage


def test_layouts_that_need_more_gpus_are_named() -> None:
    assert left_out(8) == []
    assert left_out(4) == ["tp 4 pp 2 interleaved"]
    assert left_out(2) == ["tp 2 pp 2 zero 1", "tp 4 pp 2 interleaved"]
    assert "pp 2 zbv" in dense_layouts(2)


def test_a_share_keeps_microbatches_and_what_the_schedule_needs() -> None:
    flat = Layout(tp=1, pp=1, dp=8, num_microbatches=9, microbatch=4, seq=4096)
    assert shortened(flat, 0.25) == flat._replace(num_microbatches=2)
    pipeline = flat._replace(pp=4, dp=2, num_microbatches=36, style="interleaved", chunks=2)
    assert shortened(pipeline, 0.25).num_microbatches == 12
    assert shortened(pipeline, 0.01).num_microbatches == 8
    assert shortened(pipeline, 1.0) == pipeline


def test_the_small_model_of_a_layout_takes_any_batch() -> None:
    layout = Layout(
        tp=2, pp=2, dp=1, num_microbatches=36, microbatch=4, seq=4096, style="interleaved", chunks=4, zero=1
    )
    case = parse_case(f"{parity_text(layout)} num_hidden_layers=16 num_microbatches=8", world=4, steps=1)
    assert case.plan.pipeline.num_model_chunks == 4
    assert case.plan.pipeline.microbatch_size == 1
