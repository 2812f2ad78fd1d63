"""Copies of a weight on tensor-parallel ranks stay equal, bit for bit, although each rank rounds in its own way."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch

from hpjob.plan.model import Axis
from hpjob.runtime import engine as engine_module
from hpjob.runtime.engine import Engine
from hpjob.runtime.mesh import build_mesh
from hpjob.runtime.parity.case import Case, parse_case
from hpjob.runtime.parity.data import global_batch, rank_batch
from hpjob.runtime.process_pool import ProcessPool

pytestmark = pytest.mark.distributed
SMALL = "num_hidden_layers=2 hidden_size=32 intermediate_size=48 vocab_size=96 seq_length=16 num_microbatches=2"
DENSE_COPIES = ["input_layernorm", "post_attention_layernorm"]


def train_with_own_rounding(case: Case, copies: bool) -> dict[str, torch.Tensor]:
    """Train two steps in which a rank's gradients of what it has a copy of are a little its own."""
    mesh = build_mesh(case.plan, "cpu")
    engine = Engine(case.plan, case.recipe, mesh, torch.device("cpu"))
    factor = 1.0 + 2.0**-6 * mesh.coordinate(Axis.TP)
    copied = [item for item in engine.parameters if item.copied_over_tp]
    for item in copied:
        item.parameter.register_hook(lambda gradient: gradient * factor)
    with nullcontext() if copies else patch.object(engine_module, "copy_gradients", lambda *_: None):
        for step in (1, 2):
            engine.train_step(rank_batch(global_batch(case.recipe, step), mesh.dp_rank, mesh.dp_size), step)
    return {item.name: item.local.clone() for item in copied}


@pytest.mark.parametrize(
    ("layout", "model_type", "names"),
    [
        ("tp_size=2 precision=bf16", "llama", DENSE_COPIES),
        ("tp_size=2 dp_size=2 zero_stage=1 precision=fp32", "llama", DENSE_COPIES),
        ("tp_size=2 precision=fp32 num_experts=2 num_experts_per_tok=1", "mixtral", [*DENSE_COPIES, "gate"]),
    ],
)
def test_copies_stay_equal(pool: ProcessPool, layout: str, model_type: str, names: list[str]) -> None:
    case = parse_case(f"{SMALL} {layout}", world=None, steps=4, model_type=model_type)
    world = case.plan.degrees.world_size
    ranks = pool.run(train_with_own_rounding, case, True, world=world)
    assert all(any(name in copied for copied in ranks[0]) for name in names)
    # Neighbours in the world are those of one tensor-parallel group.
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])


def test_copies_would_part(pool: ProcessPool) -> None:
    case = parse_case(f"{SMALL} tp_size=2 precision=bf16", world=None, steps=4)
    first, second = pool.run(train_with_own_rounding, case, False, world=2)
    assert not any(torch.equal(first[name], second[name]) for name in first)
