"""State goes through torch's distributed checkpoint from any mesh to any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hpjob.runtime.engine import Engine, StepResult
from hpjob.runtime.mesh import Mesh, build_mesh
from hpjob.runtime.parity.case import Case, parse_case
from hpjob.runtime.parity.compare import assemble, relative_difference
from hpjob.runtime.parity.data import global_batch, rank_batch
from hpjob.runtime.parity.worker import Part
from hpjob.runtime.process_pool import ProcessPool

pytestmark = pytest.mark.distributed

SMALL = "num_hidden_layers=4 hidden_size=32 intermediate_size=48 vocab_size=97 seq_length=16 precision=fp32"


def case(text: str, *, seed: int = 42, model: str = "llama") -> Case:
    return parse_case(f"{SMALL} seed={seed} {text}", world=None, steps=6, model_type=model)


def _steps(engine: Engine, mesh: Mesh, case: Case, steps: list[int]) -> list[StepResult]:
    return [
        engine.train_step(rank_batch(global_batch(case.recipe, step), mesh.dp_rank, mesh.dp_size), step)
        for step in steps
    ]


def train(case: Case, steps: list[int], load: str | None, save: str | None) -> tuple[list[StepResult], list[Part]]:
    mesh = build_mesh(case.plan, "cpu")
    engine = Engine(case.plan, case.recipe, mesh, torch.device("cpu"))
    if load:
        state = engine.state_dict()
        dcp.load(state, checkpoint_id=load)
        engine.load_state_dict(state)
    results = _steps(engine, mesh, case, steps)
    if save:
        dcp.save(engine.state_dict(), checkpoint_id=save)
    return results, [(p.name, p.region, p.local.clone()) for p in engine.parameters]


def names(case: Case) -> tuple[list[str], int]:
    mesh = build_mesh(case.plan, "cpu")
    state = Engine(case.plan, case.recipe, mesh, torch.device("cpu")).state_dict()
    return sorted(state), int(state["optimizer.step"])


# Four sequences a step in every layout, so that all train on the same batches.
CHAIN = [
    "tp_size=2 dp_size=2 zero_stage=1 num_microbatches=2",
    "pp_size=2 dp_size=2 zero_stage=0 num_microbatches=2",
    "tp_size=4 pp_size=2 num_microbatches=4 num_key_value_heads=4",
    "pp_size=2 pp_style=zbv num_model_chunks=2 num_microbatches=4",
    "dp_size=1 num_microbatches=4",
]
EXPERT_CHAIN = [
    "dp_size=4 ep_size=2 zero_stage=1 num_microbatches=1",
    "tp_size=2 dp_size=2 ep_size=2 zero_stage=0 num_microbatches=2",
    "sp_size=2 dp_size=4 ep_size=4 sequence_parallelism_mode=all_to_all zero_stage=3 num_microbatches=1",
    "dp_size=1 num_microbatches=4",
]


@pytest.mark.parametrize(
    ("model", "settings", "chain"),
    [
        ("llama", "tie_word_embeddings=false", CHAIN),
        ("llama", "tie_word_embeddings=true", CHAIN),
        ("mixtral", "num_experts=4 num_experts_per_tok=2", EXPERT_CHAIN),
    ],
)
def test_a_run_goes_on_over_changing_layouts(
    pool: ProcessPool, tmp_path: Path, model: str, settings: str, chain: list[str]
) -> None:
    layouts = [case(f"{text} {settings}", seed=seed, model=model) for seed, text in enumerate(chain)]
    plain = case(f"dp_size=1 num_microbatches=4 {settings}", seed=0, model=model)
    steps = list(range(1, len(chain) + 1))
    ((expected, expected_weights),) = pool.run(train, plain, steps, None, None, world=1)
    found = []
    for number, layout in enumerate(layouts):
        load = str(tmp_path / str(number - 1)) if number else None
        ranks = pool.run(train, layout, [number + 1], load, str(tmp_path / str(number)), world=layout.world)
        found += ranks[0][0]
    assert [r.loss for r in found] == pytest.approx([r.loss for r in expected], rel=1e-6)
    assert [r.grad_norm for r in found] == pytest.approx([r.grad_norm for r in expected], rel=1e-5)
    weights, differing = assemble(ranks[0][1])
    whole, _ = assemble(expected_weights)
    assert not differing
    assert relative_difference(weights, whole) < 1e-5


@pytest.mark.parametrize(
    "layout",
    [
        "tp_size=2 pp_size=2 zero_stage=1",
        "dp_size=2 zero_stage=3",
        "pp_size=2 dp_size=2 pp_style=zbv num_model_chunks=2 tie_word_embeddings=true",
        "sp_size=2 sequence_parallelism_mode=ring_attn precision=fp16 initial_scale=2e6",
    ],
)
def test_resuming_in_the_same_layout_gives_the_same_bits(pool: ProcessPool, tmp_path: Path, layout: str) -> None:
    first = case(layout)
    straight = pool.run(train, first, [1, 2, 3, 4], None, None, world=first.world)
    pool.run(train, first, [1, 2], None, str(tmp_path / "half"), world=first.world)
    other_start = case(layout, seed=7)
    resumed = pool.run(train, other_start, [3, 4], str(tmp_path / "half"), None, world=first.world)
    for (all_steps, weights), (last_steps, again) in zip(straight, resumed, strict=True):
        assert last_steps == all_steps[2:]
        assert all(torch.equal(a, b) for (_, _, a), (_, _, b) in zip(weights, again, strict=True))


def test_names_are_global(pool: ProcessPool) -> None:
    ranks = pool.run(names, case("pp_size=2 tie_word_embeddings=true"), world=2)
    first, last = (set(keys) for keys, _ in ranks)
    assert "model.layers.1.self_attn.q_proj.weight" in first
    assert "optimizer.exp_avg_sq.model.layers.3.mlp.down_proj.weight" in last
    assert {"model.embed_tokens.weight", "optimizer.step"} <= first & last
    assert not any("lm_head" in name for name in first | last)
    assert not any(".layers.2." in name for name in first)
