"""Forward-only evaluation between training steps, and the pass that loads all code before the first one."""

from __future__ import annotations

import pytest
import torch

from hpjob.runtime.engine import Batch, Engine
from hpjob.runtime.mesh import build_mesh
from hpjob.runtime.parity.case import Case, parse_case
from hpjob.runtime.parity.data import global_batch, rank_batch
from hpjob.runtime.process_pool import ProcessPool

pytestmark = pytest.mark.distributed

SMALL = "num_hidden_layers=4 hidden_size=32 intermediate_size=48 vocab_size=97 seq_length=16 precision=fp32"


def case(text: str) -> Case:
    return parse_case(f"{SMALL} {text}", world=None, steps=4)


def train_and_evaluate(case: Case, sequences: int) -> tuple[list[float], float, int]:
    """Losses of two steps, and between them the evaluation of some sequences, after a warm-up; 0 = neither."""
    mesh = build_mesh(case.plan, "cpu")
    engine = Engine(case.plan, case.recipe, mesh, torch.device("cpu"))

    def step(number: int) -> float:
        return engine.train_step(rank_batch(global_batch(case.recipe, number), mesh.dp_rank, mesh.dp_size), number).loss

    if sequences:
        engine.warm_up(rank_batch(global_batch(case.recipe, 7), mesh.dp_rank, mesh.dp_size))
    first = step(1)
    loss, tokens = 0.0, 0
    if sequences:
        whole = global_batch(case.recipe, 99)
        count = sequences // mesh.dp_size
        part = slice(mesh.dp_rank * count, (mesh.dp_rank + 1) * count)
        chosen = Batch(
            input_ids=whole.input_ids[part], labels=whole.labels[part], position_ids=whole.position_ids[part]
        )
        loss, tokens = engine.evaluate(chosen)
    return [first, step(2)], loss, tokens


@pytest.mark.parametrize(
    "layout",
    [
        "pp_size=2 num_microbatches=2 microbatch_size=4",
        "pp_size=2 dp_size=2 pp_style=zbv num_model_chunks=2 zero_stage=1 num_microbatches=4",
        "pp_size=2 pp_style=interleaved num_model_chunks=2 tp_size=2 num_microbatches=8",
        "dp_size=2 zero_stage=3 num_microbatches=4",
        "tp_size=2 sequence_parallelism_mode=split_gather num_microbatches=2 microbatch_size=4",
        "sp_size=2 sequence_parallelism_mode=ring_attn num_microbatches=8",
    ],
)
def test_warm_up_and_evaluation_of_another_batch_size_leave_training_as_it_is(pool: ProcessPool, layout: str) -> None:
    layouts = case(layout), case("num_microbatches=8")
    undisturbed = pool.run(train_and_evaluate, layouts[0], 0, world=layouts[0].world)
    ranks = pool.run(train_and_evaluate, layouts[0], 6, world=layouts[0].world)
    ((_, expected, tokens),) = pool.run(train_and_evaluate, layouts[1], 6, world=1)
    for (losses, loss, counted), (plain, _, _) in zip(ranks, undisturbed, strict=True):
        assert losses == plain
        assert counted == tokens
        assert loss == pytest.approx(expected, rel=1e-5)
