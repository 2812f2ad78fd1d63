"""Step times: every part has its price, and better hardware is never slower."""

from dataclasses import replace

import pytest

from hpjob.plan.constants import Calibration, framework
from hpjob.plan.hardware import Hardware, hardware_of
from hpjob.plan.layout import Layout
from hpjob.plan.shape import shape_of
from hpjob.plan.step_time import StepModel
from hpjob.recipe.load import load_recipe
from hpjob.topology.load import load_machine

_SHAPE = shape_of(load_recipe("70b", []).model)
_BASE = Layout(tp=4, pp=4, dp=4, num_microbatches=16, microbatch=1, seq=4096, recompute="full")


def _hardware(machine: str = "dgx-a100-80g") -> Hardware:
    return hardware_of(load_machine(machine))


def _step(layout: Layout = _BASE, hardware: Hardware | None = None) -> float:
    return StepModel(_SHAPE, hardware or _hardware()).step(layout).step


def test_parts_add_up_and_are_not_negative() -> None:
    parts = StepModel(_SHAPE, _hardware()).step(_BASE)
    values = (parts.compute, parts.bubble, parts.tp_comm, parts.pp_comm, parts.dp_comm, parts.optimizer)
    assert min(values) >= 0
    assert parts.step == pytest.approx(sum(values))


@pytest.mark.parametrize("field", ["peak_half", "memory_bandwidth", "island_bandwidth", "nic_bandwidth"])
def test_faster_hardware_is_never_slower(field: str) -> None:
    slow = _hardware()
    fast = replace(slow, **{field: 2 * getattr(slow, field)})
    assert _step(hardware=fast) < _step(hardware=slow)


def test_recomputation_costs_about_a_third_and_zbv_saves_bubble() -> None:
    assert 1.2 < _step() / _step(_BASE._replace(recompute="none")) < 1.4
    model = StepModel(_SHAPE, _hardware())
    assert model.step(_BASE._replace(style="zbv", chunks=2)).bubble < 0.7 * model.step(_BASE).bubble
    assert model.step(_BASE._replace(style="interleaved", chunks=2)).bubble < 0.7 * model.step(_BASE).bubble


def test_tp_across_nodes_is_far_slower_than_inside_an_island() -> None:
    inside = StepModel(_SHAPE, _hardware()).step(_BASE._replace(tp=8, pp=2)).tp_comm
    two_islands = replace(_hardware(), gpus_per_node=4, island_size=4, nic_bandwidth=_hardware().nic_bandwidth / 2)
    across = StepModel(_SHAPE, two_islands).step(_BASE._replace(tp=8, pp=2)).tp_comm
    assert across > 2 * inside


def test_formula_and_simulation_agree_on_equal_stages() -> None:
    model = StepModel(_SHAPE, _hardware())
    for layout in (_BASE, _BASE._replace(style="interleaved", chunks=2), _BASE._replace(pp=1, dp=16)):
        assert model.step(layout, simulate=False).step == pytest.approx(model.step(layout).step, rel=0.06)


def test_corrections_move_the_time_the_way_they_say() -> None:
    machine = load_machine("dgx-a100-80g")

    def step(**changes: float) -> float:
        return _step(hardware=hardware_of(machine, None, Calibration().updated(changes)))

    assert step(gemm=1.1) < step()
    assert step(traffic=1.5) > step()
    assert step(island=0.4) > step()


def test_frameworks_are_told_apart_by_name() -> None:
    assert framework("Megatron-LM").attention == "unfused"
    assert framework("NeMo 2.0 (Megatron-Core)").attention == "cudnn"
    assert framework("Megatron-Core 0.8").attention == "flash2"
    assert framework("Composer FSDP (llm-foundry)").default_zero == 3
    assert framework("something new").name == "something new"
