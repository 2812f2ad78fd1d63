"""The model of the runtime of this project against what two H200 measured (benchmarks/results, docs/speed.md)."""

from dataclasses import replace

import pytest

from hpjob.plan.hardware import hardware_of
from hpjob.plan.layout import Layout
from hpjob.plan.own_runtime import OwnRuntime
from hpjob.plan.shape import Shape
from hpjob.topology.load import load_machine

_SHAPE = Shape(num_layers=16, hidden=4096, ffn=11008, heads=32, kv_heads=32, head_dim=128, vocab=32000)

# sequence, tp, pp, dp, zero, chunks, split_gather, microbatches, their size, seconds of a step, reserved GiB
_MEASURED = (
    (2048, 1, 1, 1, 0, 1, 0, 2, 8, 1.173, 93.4),
    (2048, 2, 1, 1, 0, 1, 0, 2, 16, 1.337, 78.5),
    (2048, 2, 1, 1, 0, 1, 1, 2, 16, 1.332, 66.8),
    (2048, 1, 1, 1, 0, 1, 0, 8, 2, 1.228, 68.9),
    (2048, 1, 2, 1, 0, 1, 0, 16, 2, 1.381, 39.4),
    (2048, 1, 2, 1, 0, 2, 0, 16, 2, 1.318, 41.7),
    (2048, 1, 1, 2, 1, 1, 0, 2, 8, 1.216, 82.6),
    (2048, 1, 1, 2, 3, 1, 0, 2, 8, 1.269, 64.4),
    (2048, 1, 1, 2, 0, 1, 0, 2, 8, 1.246, 109.7),
    (2048, 1, 1, 2, 2, 1, 0, 2, 8, 1.225, 70.0),
    (8192, 1, 1, 2, 1, 1, 0, 2, 2, 1.387, 82.6),
    (8192, 1, 1, 2, 3, 1, 0, 2, 2, 1.441, 64.4),
    (8192, 1, 1, 2, 0, 1, 0, 2, 2, 1.422, 109.7),
    (8192, 1, 1, 2, 2, 1, 0, 2, 2, 1.406, 70.0),
    (32768, 1, 1, 1, 0, 1, 0, 1, 1, 2.304, 84.4),
    (32768, 1, 1, 2, 1, 1, 0, 1, 1, 2.35, 75.0),
    (32768, 1, 1, 2, 3, 1, 0, 1, 1, 2.365, 66.8),
    (32768, 2, 1, 1, 0, 1, 0, 1, 2, 2.503, 74.4),
    (32768, 1, 1, 2, 0, 1, 0, 1, 1, 2.388, 101.9),
    (32768, 1, 1, 2, 2, 1, 0, 1, 1, 2.358, 75.0),
)


def _errors(row: tuple[float, ...]) -> tuple[float, float]:
    seq, tp, pp, dp, zero, chunks, gathered, count, size = (int(value) for value in row[:9])
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        num_microbatches=count,
        microbatch=size,
        seq=seq,
        sequence_mode="split_gather" if gathered else None,
        zero=zero,  # type: ignore[arg-type]
        style="interleaved" if chunks > 1 else "1f1b",
        chunks=chunks,
        recompute="full" if seq == 32768 else "none",
        every_kth=2 if seq == 32768 else 1,
    )
    runtime = OwnRuntime(_SHAPE, hardware_of(load_machine("hgx-h200"), 2))
    return runtime.step(layout).step / row[9] - 1, runtime.worst_gib(layout) / row[10] - 1


def test_steps_and_memory_of_every_measured_layout() -> None:
    """The constants were set with these rows in view: this holds what was reached."""
    errors = [_errors(row) for row in _MEASURED]
    times, memory = [abs(time) for time, _ in errors], [abs(gib) for _, gib in errors]
    assert sum(times) / len(times) < 0.02
    assert max(times) < 0.06
    assert sum(memory) / len(memory) < 0.03
    assert max(memory) < 0.09


def test_another_run_that_set_no_memory_constant() -> None:
    """Half as many layers, one microbatch: 53,814 tokens/s and 42.9 GiB at 2,048, 47,412 at 8,192."""
    shape = replace(_SHAPE, num_layers=8)
    runtime = OwnRuntime(shape, hardware_of(load_machine("hgx-h200"), 1))
    for seq, rate in ((2048, 53814), (8192, 47412)):
        layout = Layout(tp=1, pp=1, dp=1, num_microbatches=1, microbatch=16384 // seq, seq=seq, zero=0)
        assert 16384 / runtime.step(layout).step == pytest.approx(rate, rel=0.06)
        assert runtime.worst_gib(layout) == pytest.approx(42.9, rel=0.06)


def test_layers_are_compiled_where_they_can_be_traced() -> None:
    hardware = hardware_of(load_machine("hgx-h200"))
    runtime = OwnRuntime(_SHAPE, hardware)
    plain = Layout(tp=2, pp=2, dp=2, num_microbatches=8, microbatch=1, seq=4096)
    assert runtime.compiles(plain)
    for mode in ("split_gather", "all_to_all", "ring_attn"):
        assert runtime.compiles(plain._replace(sequence_mode=mode))
    zbv = plain._replace(style="zbv", chunks=2)
    assert runtime.compiles(zbv)
    for eager in (plain._replace(sequence_mode="ring"), zbv._replace(sequence_mode="split_gather")):
        assert not runtime.compiles(eager)
        compiled = eager._replace(sequence_mode="split_gather", style="1f1b", chunks=1)
        assert runtime.worst_gib(eager) > runtime.worst_gib(compiled), "eager layers keep more"
    assert not OwnRuntime(_SHAPE, hardware, compiles=False).compiles(plain)
    assert not OwnRuntime(replace(_SHAPE, num_experts=8, experts_per_token=2), hardware).compiles(plain)
