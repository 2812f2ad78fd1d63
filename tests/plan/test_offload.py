"""Optimizer states in the host's memory: only where nothing fits without, inside that memory, at a price."""

from pathlib import Path

import pytest

from hpjob.core.errors import NothingFitsError
from hpjob.plan.legality import layout_of, unsupported_by_runtime
from hpjob.plan.model import Plan
from hpjob.plan.planner import make_plan, make_problem
from hpjob.recipe.load import dump_recipe, load_recipe
from hpjob.topology.load import load_machine, machine_topology


def _plan(recipe: str, nodes: int, machine: str, *overrides: str, host_gib: float | None = -1) -> Plan:
    kind = load_machine(machine)
    if host_gib != -1:
        kind = kind.model_copy(update={"host_memory_gib": host_gib})
    return make_plan(load_recipe(recipe, list(overrides)), machine_topology(kind, nodes))


def test_a_model_too_large_for_the_gpus_of_a_node_gets_an_offloaded_plan() -> None:
    plan = _plan("70b", 1, "dgx-a100-80g")
    assert plan.cpu_offload
    assert plan.zero_stage >= 1
    assert unsupported_by_runtime(plan) == []
    assert max(rank.total_gib for rank in plan.memory) <= plan.memory_limit_gib
    # 69e9 parameters of 16 bytes in the memory of one node.
    assert any("nothing fits without offloading" in w and "1,028 GiB a node of 2,048" in w for w in plan.warnings)
    assert plan == _plan("70b", 1, "dgx-a100-80g")


def test_nothing_is_offloaded_where_a_plan_fits_without() -> None:
    plan = _plan("70b", 4, "dgx-a100-80g")
    assert not plan.cpu_offload
    assert not any("offload" in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    ("overrides", "host_gib", "why"),
    [
        ((), 1024, "offloading needs about 1,028 GiB of a node's own memory, 922 are usable"),
        (("parallel.cpu_offload=true",), 1024, "offloading needs about 1,028 GiB of a node's own memory"),
        (("parallel.zero_stage=0",), 2048, "offloading needs ZeRO stage 1 or more, and zero_stage 0 is fixed"),
        (("data.seq_length=1048576", "parallel.sp_size=1"), 2048, "nor does anything fit with offloading"),
    ],
)
def test_why_offloading_does_not_help_is_said(overrides: tuple[str, ...], host_gib: float, why: str) -> None:
    with pytest.raises(NothingFitsError) as caught:
        _plan("70b", 1, "dgx-a100-80g", *overrides, host_gib=host_gib)
    assert why in caught.value.message


def test_a_host_of_unknown_size_is_named() -> None:
    plan = _plan("70b", 1, "dgx-a100-80g", host_gib=None)
    assert any("how much a node has is not known" in warning for warning in plan.warnings)


def test_traffic_to_the_host_costs_by_its_link_and_by_what_travels() -> None:
    fixed = load_recipe("70b", ["parallel.cpu_offload=true"])
    machine = load_machine("dgx-a100-80g")
    layout = layout_of(_plan("70b", 1, "dgx-a100-80g"))

    def seconds(zero: int, gb_s: float) -> float:
        kind = machine.model_copy(update={"host_bandwidth_gb_s": gb_s})
        runtime = make_problem(fixed, machine_topology(kind, 1)).runtime
        return runtime.step(layout._replace(zero=zero)).optimizer  # type: ignore[arg-type]

    once = seconds(1, 32)
    # A rank's eighth goes there in fp32 and comes back: 69e9 x 8 bytes at 0.8 of 32 GB/s and of 16 GB/s.
    assert seconds(1, 16) - once == pytest.approx(69e9 / 8 * 8 / 25.6e9, rel=0.05)
    assert seconds(2, 32) > 10 * once, "gradients of every microbatch"
    assert seconds(3, 32) > seconds(2, 32), "and the weights of both passes"


def test_the_open_choice_survives_a_file_and_can_be_closed(tmp_path: Path) -> None:
    recipe = load_recipe("70b", [])
    assert recipe.parallel.cpu_offload == "auto"
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(str(tmp_path / "again.yaml"), []).parallel.cpu_offload == "auto"
    assert load_recipe("70b", ["parallel.cpu_offload=false"]).parallel.cpu_offload is False
