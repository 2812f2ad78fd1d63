"""Memory by hand for layouts that are small enough to count."""

import pytest

from hpjob.plan.constants import framework
from hpjob.plan.layout import Layout, split_layers
from hpjob.plan.memory import GIB, in_flight, layer_activation_bytes, rank_bytes, worst_total_gib
from hpjob.plan.shape import Shape, shape_of
from hpjob.recipe.load import load_recipe

_GPT = Shape(
    num_layers=8, hidden=1024, ffn=4096, heads=16, kv_heads=16, head_dim=64, vocab=32000, gated=False, rms_norm=False
)


def _layout(**changes: object) -> Layout:
    values: dict[str, object] = {"tp": 1, "pp": 1, "dp": 1, "num_microbatches": 8, "microbatch": 2, "seq": 512}
    return Layout(**(values | changes))  # type: ignore[arg-type]


def test_states_of_the_runtime_are_eighteen_bytes_a_parameter_and_zero_shards_them() -> None:
    shape = shape_of(load_recipe("7b", []).model)
    habits = framework("hpjob")

    def states(zero: int) -> float:
        bytes_ = rank_bytes(shape, _layout(dp=8, zero=zero, seq=128), 0, habits)
        return (bytes_.weights + bytes_.gradients + bytes_.optimizer) / shape.num_params

    assert states(0) == pytest.approx(18.0)
    assert states(1) == pytest.approx(6 + 12 / 8)
    assert states(2) == pytest.approx(2 + 16 / 8)
    gathered = 2 * 2 * shape.dense_layer_params / shape.num_params
    assert states(3) == pytest.approx(18 / 8 + gathered)


def test_classic_block_keeps_what_the_literature_counts() -> None:
    """Korthikanti et al.: s·b·h·(34 + 5·a·s/h) bytes with dropout and a score matrix in memory."""
    habits = framework("Megatron-LM")
    layout = _layout(flash=False)
    expected = layout.tokens * _GPT.hidden * (34 + 5 * _GPT.heads * layout.seq / _GPT.hidden)
    found = layer_activation_bytes(_GPT, layout, habits)
    assert found == pytest.approx(expected, rel=0.03)
    sharded = layer_activation_bytes(_GPT, _layout(flash=False, tp=4, sequence_mode="split_gather"), habits)
    assert sharded == pytest.approx(expected / 4, rel=0.03)


def test_microbatches_in_flight() -> None:
    one = [in_flight(_layout(pp=4), rank) for rank in range(4)]
    assert one == [4, 3, 2, 1]
    assert in_flight(_layout(pp=4, style="interleaved", chunks=2), 0) == pytest.approx(4 * (1 + 3 / 8) + 0.0, abs=0.51)
    assert {in_flight(_layout(pp=4, style="zbv", chunks=2), rank) for rank in range(4)} == {4.0}
    assert in_flight(_layout(pp=8, num_microbatches=2), 0) == 2


def test_full_recomputation_keeps_the_input_of_a_layer_only() -> None:
    habits = framework("hpjob")
    none = rank_bytes(_GPT, _layout(), 0, habits).activations
    full = rank_bytes(_GPT, _layout(recompute="full"), 0, habits).activations
    every_second = rank_bytes(_GPT, _layout(recompute="full", every_kth=2), 0, habits).activations
    assert full < every_second < none
    stored = 1024 * _GPT.hidden * 2 * _GPT.num_layers
    assert full - stored < none / _GPT.num_layers * 1.6


def test_the_fullest_rank_counts() -> None:
    shape = shape_of(load_recipe("llama3-8b", []).model)
    layout = _layout(pp=4, seq=8192, recompute="full")
    totals = [rank_bytes(shape, layout, rank, framework("hpjob")).total / GIB for rank in range(4)]
    assert worst_total_gib(shape, layout) == pytest.approx(max(totals))
    assert totals.index(max(totals)) == 3, "the logits of 128,256 words outweigh the microbatches in flight"


def test_layers_are_split_evenly_and_the_ends_give_way() -> None:
    assert split_layers(80, 16) == (5,) * 16
    assert split_layers(30, 4) == (7, 8, 8, 7)
    with pytest.raises(ValueError, match="fewer than"):
        split_layers(3, 4)
