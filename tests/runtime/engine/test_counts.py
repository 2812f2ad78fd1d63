"""What is counted: collectives, layer forwards, attention forwards, moments of synchronisation."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hpjob.runtime.engine import Engine
from hpjob.runtime.mesh import build_mesh
from hpjob.runtime.parallel import weight_unit
from hpjob.runtime.parity.case import Case, parse_case
from hpjob.runtime.parity.data import global_batch, rank_batch
from hpjob.runtime.pipeline.executor import PipelineExecutor
from hpjob.runtime.pipeline.schedule import Action
from hpjob.runtime.process_pool import ProcessPool
from hpjob.runtime.sequence import attention_interface

pytestmark = pytest.mark.distributed

SMALL = "hidden_size=32 intermediate_size=48 vocab_size=96 seq_length=16 precision=fp32"
# Names differ between torch versions.
COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "batch_isend_irecv": "messages",
}
# Each is of all weights of a layer.
OF_UNITS = {
    "start_all_reduce": "all_reduce",
    "start_all_gather": "all_gather",
    "start_reduce_scatter": "reduce_scatter",
}


def case(text: str, *, layers: int = 4) -> Case:
    return parse_case(f"{SMALL} num_hidden_layers={layers} {text}", world=None, steps=4)


def count_step(case: Case) -> Counter[str]:
    """Count what happens in the second step; the first one also sets things up."""
    mesh = build_mesh(case.plan, "cpu")
    engine = Engine(case.plan, case.recipe, mesh, torch.device("cpu"))
    counts: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    batch = rank_batch(global_batch(case.recipe, 1), mesh.dp_rank, mesh.dp_size)
    engine.train_step(batch, 1)
    for stage in engine.stages:
        for number, layer in zip(stage.part.layers, stage.decoder_layers, strict=True):
            layer.get_submodule("mlp").register_forward_pre_hook(
                lambda *_, name=f"layer {number}": counts.update([name])
            )
    with ExitStack() as patches:
        attention = counted("attention", attention_interface.local_attention)
        patches.enter_context(patch.object(attention_interface, "local_attention", attention))
        for module, names in ((dist, COLLECTIVES), (weight_unit, OF_UNITS)):
            for name, kind in names.items():
                if hasattr(module, name):
                    patches.enter_context(patch.object(module, name, counted(kind, getattr(module, name))))
        engine.train_step(batch, 2)
    return counts


def counts_of(pool: ProcessPool, text: str, *, layers: int = 4) -> Counter[str]:
    chosen = case(text, layers=layers)
    result: Counter[str] = pool.run(count_step, chosen, world=chosen.world)[0]
    return result


def test_a_layer_needs_two_sums_forward_and_two_backward(pool: ProcessPool) -> None:
    few = counts_of(pool, "tp_size=2 num_microbatches=3", layers=1)["all_reduce"]
    many = counts_of(pool, "tp_size=2 num_microbatches=3", layers=3)["all_reduce"]
    assert many - few == 2 * 3 * 4


def test_shared_key_value_heads_cost_one_sum_a_step(pool: ProcessPool) -> None:
    cut = counts_of(pool, "tp_size=4 num_key_value_heads=4 num_microbatches=3")["all_reduce"]
    shared = counts_of(pool, "tp_size=4 num_key_value_heads=2 num_microbatches=3")["all_reduce"]
    assert shared - cut == 1


@pytest.mark.parametrize(
    ("mode", "per_layer"),
    [
        ("tp_size=2 sequence_parallelism_mode=split_gather", {"all_gather": 2 + 2, "reduce_scatter": 2 + 2}),
        # Around each of two blocks: in once, out once; backward likewise, the block's input with the gradient.
        ("tp_size=2 sequence_parallelism_mode=ring", {"messages": 4 + 4, "all_gather": 0, "all_reduce": 0}),
        ("sp_size=2 sequence_parallelism_mode=all_to_all zero_stage=0", {"all_to_all": 4 + 4}),
        # K and V go round once forward, once backward, and their gradients go all the way home.
        ("sp_size=2 sequence_parallelism_mode=ring_attn zero_stage=0", {"messages": 1 + 1 + 1}),
    ],
)
def test_what_a_layer_sends_on_a_split_sequence(pool: ProcessPool, mode: str, per_layer: dict[str, int]) -> None:
    few = counts_of(pool, f"{mode} num_microbatches=3", layers=1)
    many = counts_of(pool, f"{mode} num_microbatches=3", layers=3)
    assert {kind: many[kind] - few[kind] for kind in per_layer} == {kind: n * 2 * 3 for kind, n in per_layer.items()}


@pytest.mark.parametrize(
    ("recompute", "forwards", "attentions"),
    [
        ("none", [3, 3, 3, 3], 12),
        ("full", [6, 6, 6, 6], 24),
        ("full every_kth_layer=2", [6, 3, 6, 3], 18),
        ("full num_ckpt_layers_per_stage=3", [6, 6, 6, 3], 21),
        ("selective", [3, 3, 3, 3], 24),
    ],
)
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_recomputation(
    pool: ProcessPool, recompute: str, forwards: list[int], attentions: int, zero_stage: int
) -> None:
    counts = counts_of(pool, f"dp_size=2 recompute={recompute} zero_stage={zero_stage} num_microbatches=3")
    assert [counts[f"layer {number}"] for number in range(4)] == forwards
    assert counts["attention"] == attentions


@pytest.mark.parametrize(("recompute", "forwards"), [("none", 3), ("full", 6)])
@pytest.mark.parametrize("data", ["dp_size=1", "dp_size=2 zero_stage=1"])
def test_deferred_weight_gradients_cost_no_further_recomputation(
    pool: ProcessPool, recompute: str, forwards: int, data: str
) -> None:
    text = f"pp_size=2 pp_style=zbv num_model_chunks=2 recompute={recompute} num_microbatches=3 {data}"
    counts = counts_of(pool, text)
    assert [counts[f"layer {number}"] for number in (0, 3)] == [forwards, forwards]
    assert counts["attention"] == 2 * forwards


def test_deferred_weight_gradients_are_reduced_once(pool: ProcessPool) -> None:
    text = "pp_size=2 pp_style=zbv num_model_chunks=2 dp_size=2 zero_stage=1 num_microbatches=3"
    # Two stages of one layer each, the first with the embedding and the last with the head.
    assert counts_of(pool, text)["reduce_scatter"] == 4


# Embedding, four layers, norm and head. Three microbatches. Two all-reduces a step are of tokens and figures. With
# ZeRO 3 layers are gathered for both passes; the head once for both, as the last layer, and the first layer once for a
# backward pass and the next forward one.
@pytest.mark.parametrize(
    ("zero_stage", "gathers", "scatters", "sums"),
    [(1, 6, 6, 2), (2, 6, 18, 2), (3, 3 * (1 + 4 + 4 + 1) - 3 - 2, 18, 2)],
)
def test_zero_stages(pool: ProcessPool, zero_stage: int, gathers: int, scatters: int, sums: int) -> None:
    counts = counts_of(pool, f"dp_size=2 zero_stage={zero_stage} num_microbatches=3")
    assert counts["reduce_scatter"] == scatters
    assert counts["all_reduce"] == sums
    assert counts["all_gather"] == gathers


# Sums across groups: one of these parts and step, however often gradients are reduced inside a group.
@pytest.mark.parametrize(("zero_stage", "gathers", "scatters", "sums"), [(1, 6, 6, 6 + 2), (3, 25, 18, 6 + 2)])
def test_shards_in_groups(pool: ProcessPool, zero_stage: int, gathers: int, scatters: int, sums: int) -> None:
    counts = counts_of(pool, f"dp_size=4 zero_shard_size=2 zero_stage={zero_stage} num_microbatches=3")
    assert (counts["all_gather"], counts["reduce_scatter"], counts["all_reduce"]) == (gathers, scatters, sums)


def order_of_step(case: Case) -> list[str]:
    """Backward passes by stage, and reductions, in the order in which this rank begins them."""
    mesh = build_mesh(case.plan, "cpu")
    engine = Engine(case.plan, case.recipe, mesh, torch.device("cpu"))
    began: list[str] = []
    backward = PipelineExecutor._backward

    def noted_backward(self: PipelineExecutor, action: Action) -> None:
        began.append(f"backward {action.stage}")
        backward(self, action)

    def noted_reduction(original: Any) -> Any:
        def reduce(*args: Any, **kwargs: Any) -> Any:
            began.append("reduce")
            return original(*args, **kwargs)

        return reduce

    batch = rank_batch(global_batch(case.recipe, 1), mesh.dp_rank, mesh.dp_size)
    with ExitStack() as patches:
        patches.enter_context(patch.object(PipelineExecutor, "_backward", noted_backward))
        reduction = noted_reduction(weight_unit.start_reduce_scatter)
        patches.enter_context(patch.object(weight_unit, "start_reduce_scatter", reduction))
        engine.train_step(batch, 1)
    return began


def test_a_stage_reduces_while_another_still_runs_backwards(pool: ProcessPool) -> None:
    chosen = case("pp_size=2 dp_size=2 pp_style=interleaved num_model_chunks=2 zero_stage=1 num_microbatches=4")
    order = pool.run(order_of_step, chosen, world=chosen.world)[0]
    # One layer a stage: it is reduced inside its last backward pass, before the other stage's last ones.
    last_of_the_later_stage = max(i for i, what in enumerate(order) if what == "backward 2")
    assert order[last_of_the_later_stage + 1] == "reduce"
    assert "backward 0" in order[last_of_the_later_stage + 2 :]


def test_zero_0_reduces_each_weight_once(pool: ProcessPool) -> None:
    counts = counts_of(pool, "dp_size=2 zero_stage=0 num_microbatches=3")
    assert counts["all_reduce"] == 6 + 2
