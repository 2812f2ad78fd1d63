"""What is held for the backward pass: bytes of activations, and microbatches in flight."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hpjob.plan.model import Axis
from hpjob.runtime.engine import Engine
from hpjob.runtime.mesh import build_mesh
from hpjob.runtime.parity.case import Case, parse_case
from hpjob.runtime.parity.data import global_batch, rank_batch
from hpjob.runtime.pipeline.executor import PipelineExecutor
from hpjob.runtime.process_pool import ProcessPool
from hpjob.runtime.rehearsal.fake_world import fake_world
from tests.support.alone import AloneEngine

pytestmark = pytest.mark.distributed

SMALL = "hidden_size=32 intermediate_size=48 vocab_size=96 seq_length=32 num_attention_heads=4 precision=fp32"


def case(text: str, layers: int) -> Case:
    return parse_case(f"{SMALL} num_hidden_layers={layers} {text}", world=None, steps=2)


def saved_bytes(case: Case) -> int:
    """Bytes that autograd keeps of one microbatch beside parameters, each memory once."""
    mesh = build_mesh(case.plan, "cpu")
    engine = Engine(case.plan, case.recipe, mesh, torch.device("cpu"))
    own = {p.local.untyped_storage().data_ptr() for p in engine.parameters}
    kept: dict[int, torch.UntypedStorage] = {}

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        engine.accumulate_gradients(rank_batch(global_batch(case.recipe, 1), mesh.dp_rank, mesh.dp_size))
    return sum(storage.nbytes() for storage in kept.values())


def bytes_of_a_layer(pool: ProcessPool, text: str) -> int:
    few, many = (case(f"{text} num_microbatches=1", layers) for layers in (1, 3))
    bytes_few, bytes_many = (max(pool.run(saved_bytes, chosen, world=chosen.world)) for chosen in (few, many))
    return (bytes_many - bytes_few) // 2


@pytest.mark.parametrize("mode", ["split_gather", "ring"])
def test_a_split_sequence_keeps_its_part_of_every_activation(pool: ProcessPool, mode: str) -> None:
    whole = bytes_of_a_layer(pool, "tp_size=1")
    split = bytes_of_a_layer(pool, f"tp_size=4 sequence_parallelism_mode={mode}")
    assert split == pytest.approx(whole / 4, rel=0.01)


def test_tensor_parallelism_alone_keeps_more(pool: ProcessPool) -> None:
    whole = bytes_of_a_layer(pool, "tp_size=1")
    assert bytes_of_a_layer(pool, "tp_size=4") > whole / 4 * 1.3


def compiled_bytes_of_a_layer(text: str) -> int:
    """As :func:`bytes_of_a_layer`, of compiled layers; one rank tells, and what it receives makes no difference."""
    # The default compiler cuts the graph in two in the same way and takes much longer.
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        found = []
        for layers in (1, 3):
            chosen = case(f"{text} num_microbatches=1 enable_jit_fused=true", layers)
            with fake_world(0, chosen.world):
                found.append(saved_bytes(chosen))
            torch.compiler.reset()
    return (found[1] - found[0]) // 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
def test_a_compiled_layer_keeps_its_part_of_a_split_sequence() -> None:
    whole = compiled_bytes_of_a_layer("tp_size=1")
    split = compiled_bytes_of_a_layer("tp_size=4 sequence_parallelism_mode=split_gather")
    assert split == pytest.approx(whole / 4, rel=0.01)


def most_live(case: Case) -> tuple[int, int]:
    """This rank's place in the pipeline, and the most microbatches that wait on its stages for their backward pass."""
    mesh = build_mesh(case.plan, "cpu")
    engine = Engine(case.plan, case.recipe, mesh, torch.device("cpu"))
    peak = 0
    forward = PipelineExecutor._forward

    def counting(self: PipelineExecutor, *args: Any) -> None:
        nonlocal peak
        forward(self, *args)
        peak = max(peak, sum(len(state.saved) for state in self._stages.values()))

    with patch.object(PipelineExecutor, "_forward", counting):
        engine.accumulate_gradients(rank_batch(global_batch(case.recipe, 1), mesh.dp_rank, mesh.dp_size))
    return mesh.coordinate(Axis.PP), peak


@pytest.mark.parametrize(
    ("schedule", "most"),
    [
        ("pp_size=4", [4, 3, 2, 1]),
        # 2 (pp - 1 - rank) + (chunks - 1) pp forwards before the first backward, and the one between.
        ("pp_size=4 pp_style=interleaved num_model_chunks=2", [11, 9, 7, 5]),
        # Chunks of half a stage: never more than 1f1b holds on its first rank.
        ("pp_size=4 pp_style=zbv num_model_chunks=2", [8, 8, 8, 8]),
    ],
)
def test_live_microbatches_are_those_of_the_schedule(pool: ProcessPool, schedule: str, most: list[int]) -> None:
    chosen = case(f"{schedule} num_microbatches=8", 8)
    found = dict(pool.run(most_live, chosen, world=chosen.world))
    if "zbv" in schedule:
        assert all(found[rank] <= limit for rank, limit in enumerate(most))
    else:
        assert [found[rank] for rank in range(4)] == most


@pytest.mark.parametrize("experts", [1, 2, 3])
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_all_ranks_update_as_much_of_the_experts(experts: int, zero_stage: int) -> None:
    """However few experts a rank has; else the planner's memory is that of no rank."""
    text = f"dp_size=8 ep_size=2 num_experts={2 * experts} num_experts_per_tok=1 zero_stage={zero_stage}"
    chosen = parse_case(f"{SMALL} num_hidden_layers=1 {text}", world=None, steps=2, model_type="mixtral")
    held = set()
    for rank in range(chosen.world):
        with fake_world(rank, chosen.world):
            engine = AloneEngine(chosen.plan, chosen.recipe, build_mesh(chosen.plan, "cpu"), torch.device("cpu"))
            held.add(sum(item.local.numel() for item in engine.parameters if ".experts." in item.name))
    whole = 2 * experts * 3 * chosen.recipe.model.hidden_size * chosen.recipe.model.intermediate_size
    assert held == {whole // chosen.world}
