"""Memory by hand for layouts that are small enough to count."""

from dataclasses import replace

import pytest

from hpjob.plan.activations import in_flight, layer_activation_bytes
from hpjob.plan.constants import framework
from hpjob.plan.layer_split import best_relief
from hpjob.plan.layout import Layout, relieved_split, split_layers
from hpjob.plan.memory import GIB, MemoryModel, rank_bytes
from hpjob.plan.shape import Shape, shape_of
from hpjob.recipe.load import load_recipe

_GPT = Shape(
    num_layers=8, hidden=1024, ffn=4096, heads=16, kv_heads=16, head_dim=64, vocab=32000, gated=False, rms_norm=False
)


def _layout(**changes: object) -> Layout:
    values: dict[str, object] = {"tp": 1, "pp": 1, "dp": 1, "num_microbatches": 8, "microbatch": 2, "seq": 512}
    return Layout(**(values | changes))  # type: ignore[arg-type]


def test_states_of_a_framework_with_a_buffer_are_eighteen_bytes_a_parameter_and_zero_shards_them() -> None:
    shape = shape_of(load_recipe("7b", []).model)

    def states(zero: int, framework_name: str = "Megatron-Core", **changes: object) -> float:
        layout = _layout(dp=8, zero=zero, seq=128, **changes)
        bytes_ = rank_bytes(shape, layout, 0, framework(framework_name))
        return (bytes_.weights + bytes_.gradients + bytes_.optimizer) / shape.num_params

    assert states(0) == pytest.approx(18.0)
    assert states(1) == pytest.approx(6 + 12 / 8)
    assert states(2) == pytest.approx(2 + 16 / 8)
    gathered = 2 * 2 * shape.dense_layer_params / shape.num_params
    assert states(3) == pytest.approx(18 / 8 + gathered)
    # FSDP keeps no 16-bit shard beside the master weight.
    assert states(3, "torchtitan") == pytest.approx(16 / 8 + gathered)
    # With one microbatch, or from ZeRO 2 on, the runtime has whole sums of two layers and of one end of the model.
    sums = 4 * (2 * shape.dense_layer_params + shape.head_params) / shape.num_params
    assert states(0, "hpjob") == pytest.approx(18.0 + 4)
    assert states(1, "hpjob") == pytest.approx(6 + 12 / 8)
    assert states(1, "hpjob", num_microbatches=1) == pytest.approx(2 + 12 / 8 + sums)
    assert states(2, "hpjob") == pytest.approx(2 + 16 / 8 + sums)
    assert states(3, "hpjob") == pytest.approx(18 / 8 + gathered + sums)


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
    assert {in_flight(_layout(pp=4, style="zbv", chunks=2), rank) for rank in range(4)} == {4.5}
    assert in_flight(_layout(pp=8, num_microbatches=2), 0) == 2


def test_full_recomputation_keeps_the_input_of_a_layer_only() -> None:
    habits = framework("hpjob")
    none = rank_bytes(_GPT, _layout(), 0, habits).activations
    full = rank_bytes(_GPT, _layout(recompute="full"), 0, habits).activations
    every_second = rank_bytes(_GPT, _layout(recompute="full", every_kth=2), 0, habits).activations
    assert full < every_second < none
    stored = 1024 * _GPT.hidden * 2 * _GPT.num_layers
    assert full - stored < none / _GPT.num_layers * 1.6


def test_repeated_layers_are_counted_chunk_by_chunk() -> None:
    """Every k-th layer of a chunk is repeated, its first one always."""
    shape = replace(_GPT, num_layers=6, vocab=128)
    habits = framework("hpjob")
    kept = layer_activation_bytes(shape, _layout(), habits)
    none = rank_bytes(shape, _layout(), 0, habits).activations
    fourth = rank_bytes(shape, _layout(recompute="full", every_kth=4), 0, habits).activations
    stored = 1024 * shape.hidden * 2
    assert none - fourth == pytest.approx(2 * (kept - stored)), "layers 0 and 4 of six"


def test_key_value_heads_are_repeated_where_tp_exceeds_them() -> None:
    shape = replace(_GPT, kv_heads=2)
    habits = framework("hpjob")
    weights = [rank_bytes(shape, _layout(tp=tp), 0, habits).weights for tp in (2, 8)]
    repeated = 2 * shape.kv_width * shape.hidden * (1 / 2 - 1 / 8) * shape.num_layers * 2
    assert weights[1] == pytest.approx(weights[0] / 4 + repeated)


def test_the_fullest_rank_counts() -> None:
    shape = shape_of(load_recipe("llama3-8b", []).model)
    layout = _layout(pp=4, seq=8192, recompute="full")
    totals = [rank_bytes(shape, layout, rank, framework("hpjob")).total / GIB for rank in range(4)]
    model = MemoryModel(shape, framework("hpjob"))
    assert model.worst(layout).total / GIB == pytest.approx(max(totals))
    [by_zero] = model.totals(layout, (0, 1), [("full", 1)])
    assert by_zero[1] / GIB == pytest.approx(max(totals))
    assert totals.index(max(totals)) == 3, "the logits of 128,256 words outweigh the microbatches in flight"


def test_layers_are_split_evenly_and_the_ends_give_way() -> None:
    assert split_layers(80, 16) == (5,) * 16
    assert split_layers(30, 4) == (7, 8, 8, 7)
    assert relieved_split(32, 4, 2) == (9, 9, 8, 6)
    assert best_relief(32, 4, 1, "1f1b", 2.4) == 2, "a head of 2.4 layers is worth two of them"
    assert best_relief(32, 4, 1, "1f1b", 0.4) == 0
    assert best_relief(32, 4, 2, "zbv", 2.4) == 2, "the last stage of zbv is rank 0's"
    with pytest.raises(ValueError, match="fewer than"):
        split_layers(3, 4)
