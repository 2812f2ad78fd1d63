"""Measured stages through the schedule: the step's time and what is said of it."""

from __future__ import annotations

import pytest

from hpjob.plan.model import Plan
from hpjob.plan.planner import make_plan
from hpjob.plan.rehearsal import RankRehearsal, StageTiming
from hpjob.plan.rehearsal_text import memory_error, render_rehearsal
from hpjob.plan.rehearsed_step import rehearsed_step
from hpjob.recipe.load import load_recipe
from hpjob.topology.load import load_machine, machine_topology


@pytest.fixture(scope="module")
def plan() -> Plan:
    fixed = ["parallel.pp_size=4", "parallel.tp_size=8", "parallel.pp_style=1f1b", "parallel.sp_size=1"]
    return make_plan(load_recipe("70b", fixed), machine_topology(load_machine("dgx-a100-80g"), 4))


def report(plan: Plan, stage: int, *, seconds: float = 0.1, host_s: float = 0.01) -> RankRehearsal:
    timing = StageTiming(stage=stage, num_layers=20, forward_s=seconds, backward_s=2 * seconds)
    return RankRehearsal(
        plan_summary=plan.summary,
        rank=8 * stage,
        pp_rank=stage,
        world_size=32,
        device="a GPU",
        weights_gib=2,
        gradients_gib=4,
        optimizer_gib=8,
        peak_gib=20,
        stages=(timing,),
        optimizer_s=0.5,
        host_s=host_s,
        num_microbatches=16,
    )


def test_equal_stages_take_the_1f1b_formula_plus_the_predicted_communication(plan: Plan) -> None:
    step = rehearsed_step(plan, [report(plan, stage) for stage in range(4)])
    m, t = plan.pipeline.num_microbatches, plan.time
    one = 0.3 + t.tp_comm_s / m
    assert step is not None
    assert step.step_s == pytest.approx((m + 3) * one + 0.5 + t.pp_comm_s + t.dp_comm_s)
    assert step.measured_share == pytest.approx(((m + 3) * 0.3 + 0.5) / step.step_s)
    assert step.low_s < step.step_s < step.high_s
    assert not step.host_bound


def test_the_slowest_stage_decides(plan: Plan) -> None:
    equal = rehearsed_step(plan, [report(plan, stage) for stage in range(4)])
    uneven = rehearsed_step(plan, [report(plan, stage, seconds=0.2 if stage == 2 else 0.1) for stage in range(4)])
    assert equal is not None and uneven is not None
    assert uneven.step_s > equal.step_s + (plan.pipeline.num_microbatches - 1) * 0.3


def test_a_missing_stage_gives_no_step(plan: Plan) -> None:
    reports = [report(plan, stage) for stage in (0, 1, 3)]
    assert rehearsed_step(plan, reports) is None
    assert "--all-stages" in render_rehearsal(plan, reports)


def test_a_slow_host_is_said(plan: Plan) -> None:
    reports = [report(plan, stage, host_s=9.0 if stage == 1 else 0.01) for stage in range(4)]
    step = rehearsed_step(plan, reports)
    assert step is not None and step.host_bound
    assert "the host takes as long" in render_rehearsal(plan, reports)


def test_the_table_has_predicted_and_rehearsed_memory(plan: Plan) -> None:
    text = render_rehearsal(plan, [report(plan, stage) for stage in range(4)])
    predicted = plan.memory[0].total_gib - plan.memory[0].workspace_gib
    assert f"{predicted:.2f} GiB" in text and "20.00 GiB" in text
    assert memory_error(plan, report(plan, 0)) == pytest.approx(predicted / 20 - 1)
    assert "2.00 GiB  8.00 GiB  4.00 GiB  6.00 GiB" in text
