"""One rank of a large world, alone."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the runtime's tests need the [train] extra")
pytest.importorskip("transformers", reason="the runtime's tests need the [train] extra")

import torch
import torch.distributed as dist

from hpjob.plan.rehearsal import RankRehearsal
from hpjob.runtime.parity.case import parse_case
from hpjob.runtime.process_groups import ProcessGroups
from hpjob.runtime.rehearsal.fake_world import fake_world
from hpjob.runtime.rehearsal.rehearse import rehearse_rank

SMALL = "num_hidden_layers=4 hidden_size=32 intermediate_size=48 vocab_size=96 seq_length=16"
LAYER = 2 * 32 + 32 * (32 + 2 * 16 + 32) + 3 * 32 * 48
"""Parameters: two norms, q k v o (two of four heads for k and v), gate up down."""
GIB = 1 << 30


def rehearse(text: str, rank: int, model: str = "llama") -> RankRehearsal:
    case = parse_case(f"{SMALL} {text}", world=None, steps=6, model_type=model)
    return rehearse_rank(case.plan, case.recipe, rank, torch.device("cpu"), steps=1)


def test_a_rank_in_the_middle_of_512_holds_its_layers_and_no_more() -> None:
    report = rehearse("precision=fp32 pp_size=4 dp_size=128 zero_stage=0 num_microbatches=4", rank=200)
    assert (report.world_size, report.pp_rank) == (512, 1)
    assert [(timing.stage, timing.num_layers) for timing in report.stages] == [(1, 1)]
    assert report.weights_gib * GIB == pytest.approx(4 * LAYER)
    assert report.optimizer_gib * GIB == pytest.approx(8 * LAYER)
    assert report.peak_gib > report.weights_gib + report.optimizer_gib + report.gradients_gib


def test_zero_1_divides_the_optimizer_by_dp() -> None:
    alone = rehearse("precision=fp32 pp_size=2 num_microbatches=2", rank=0)
    shared = rehearse("precision=fp32 pp_size=2 dp_size=16 zero_stage=1 num_microbatches=2", rank=0)
    assert shared.optimizer_gib == pytest.approx(alone.optimizer_gib / 16, rel=0.05)


def test_more_microbatches_in_flight_hold_more() -> None:
    first = rehearse("precision=fp32 pp_size=4 num_microbatches=8", rank=1)
    last_but_one = rehearse("precision=fp32 pp_size=4 num_microbatches=8", rank=2)
    assert first.working_gib > 1.2 * last_but_one.working_gib


def test_recomputation_holds_less() -> None:
    kept = rehearse("precision=fp32 pp_size=2 num_microbatches=4", rank=0)
    recomputed = rehearse("precision=fp32 pp_size=2 num_microbatches=4 recompute=full", rank=0)
    assert recomputed.working_gib < 0.8 * kept.working_gib


@pytest.mark.parametrize(
    ("text", "rank", "model"),
    [
        ("tp_size=2 pp_size=2 dp_size=2 pp_style=zbv num_model_chunks=2 zero_stage=3 num_microbatches=4", 7, "llama"),
        ("tp_size=2 sequence_parallelism_mode=ring num_microbatches=2", 1, "llama"),
        ("sp_size=4 sequence_parallelism_mode=ring_attn num_microbatches=2", 2, "llama"),
        ("sp_size=2 sequence_parallelism_mode=all_to_all num_microbatches=2", 1, "llama"),
        ("dp_size=4 ep_size=4 num_experts=4 num_experts_per_tok=2 num_microbatches=2", 3, "mixtral"),
    ],
)
def test_every_kind_of_parallelism_can_be_rehearsed(text: str, rank: int, model: str) -> None:
    report = rehearse(f"precision=bf16 {text}", rank, model)
    assert report.rank == rank
    for timing in report.stages:
        assert timing.forward_s > 0 and timing.backward_s > 0
        assert (timing.weight_s is not None) == ("zbv" in text)


def test_a_rehearsal_on_a_gpu_opens_no_real_groups_for_messages() -> None:
    with fake_world(1, 4):
        first, second = ProcessGroups("cuda").for_messages([[0, 1], [2, 3]], 2)
        assert first is second and first is not None
        assert dist.get_backend(first) == "fake"
