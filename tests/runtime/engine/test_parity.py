"""Layouts give the numbers of one plain process; deliberate faults do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hpjob.runtime.parity.compare import TOLERANCES, Outcome

pytestmark = pytest.mark.distributed

LAYOUTS = [
    "tp_size=2",
    "pp_size=2",
    "dp_size=2",
    "tp_size=2 pp_size=2",
    "tp_size=2 pp_size=2 dp_size=2",
    "pp_size=4",
]


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_one_process(parity: Callable[..., Outcome], layout: str, zero_stage: int) -> None:
    outcome = parity(f"{layout} zero_stage={zero_stage}")
    assert outcome.ok, outcome


@pytest.mark.parametrize(
    "case",
    [
        "tp_size=2 dp_size=2 zero_stage=2",
        "pp_size=2 dp_size=2 zero_stage=3 recompute=full every_kth_layer=2",
        "dp_size=3 zero_stage=3 num_microbatches=3",
        "tp_size=4 num_key_value_heads=2 vocab_size=97",
        "tp_size=4 num_key_value_heads=1 dp_size=2 zero_stage=1",
        "tp_size=4 vocab_size=7 tie_word_embeddings=true dp_size=2 zero_stage=0",
        "tp_size=2 pp_size=2 dp_size=2 tie_word_embeddings=true zero_stage=1",
        "pp_size=2 layers_per_stage=3,1 microbatch_size=2",
        "pp_size=4 num_microbatches=2",
        "tp_size=2 pp_size=2 dp_size=2 sequence_parallelism_mode=split_gather zero_stage=1",
        "tp_size=4 sequence_parallelism_mode=split_gather num_key_value_heads=2 recompute=full zero_stage=3",
        "pp_size=2 dp_size=2 pp_style=interleaved num_model_chunks=2 zero_stage=1",
        "pp_size=2 pp_style=interleaved num_model_chunks=2 layers_per_stage=1,1,1,1 tie_word_embeddings=true",
        "tp_size=2 recompute=selective max_norm=0.1",
    ],
)
def test_further_cases_equal_one_process(parity: Callable[..., Outcome], case: str) -> None:
    outcome = parity(case)
    assert outcome.ok, outcome


@pytest.mark.parametrize(
    "case",
    [
        "tp_size=2 dp_size=2 sequence_parallelism_mode=ring seq_length=15 zero_stage=2",
        "tp_size=4 sequence_parallelism_mode=ring num_key_value_heads=2 recompute=full",
        "sp_size=2 dp_size=2 sequence_parallelism_mode=all_to_all zero_stage=2 tie_word_embeddings=true",
        "sp_size=4 sequence_parallelism_mode=all_to_all num_key_value_heads=2 seq_length=13",
        "tp_size=2 sp_size=2 sequence_parallelism_mode=ring_attn zero_stage=3 recompute=full seq_length=13",
        "pp_size=2 sp_size=2 dp_size=2 sequence_parallelism_mode=ring_attn zero_stage=1",
        "sp_size=4 sequence_parallelism_mode=ring_attn num_key_value_heads=1 recompute=selective zero_stage=0",
        "sp_size=4 sequence_parallelism_mode=ring_attn gpus_per_node=2 tp_size=1 zero_stage=1",
        "tp_size=2 sp_size=4 sequence_parallelism_mode=ring_attn gpus_per_node=4 documents=2",
        "documents=3 tp_size=2 sequence_parallelism_mode=split_gather",
        "documents=3 sp_size=2 sequence_parallelism_mode=all_to_all pp_size=2 seq_length=15",
        "documents=2 sp_size=4 sequence_parallelism_mode=ring_attn seq_length=18",
    ],
)
def test_split_sequences_equal_one_process(parity: Callable[..., Outcome], case: str) -> None:
    outcome = parity(case)
    assert outcome.ok, outcome


@pytest.mark.parametrize(
    "case",
    [
        "recompute=full",
        "dp_size=2 zero_stage=1 tie_word_embeddings=true",
        "dp_size=2 zero_stage=3 num_microbatches=3",
        "tp_size=2 sequence_parallelism_mode=ring num_key_value_heads=1",
        "sp_size=2 sequence_parallelism_mode=all_to_all dp_size=2 zero_stage=0 recompute=selective",
    ],
)
def test_zbv_equals_one_process(parity: Callable[..., Outcome], case: str) -> None:
    outcome = parity(f"pp_size=2 pp_style=zbv num_model_chunks=2 {case}")
    assert outcome.ok, outcome


@pytest.mark.parametrize(
    ("model", "case"),
    [
        ("mistral", "tp_size=2 dp_size=2 zero_stage=1"),
        ("qwen2", "tp_size=2 pp_size=2 sequence_parallelism_mode=split_gather"),
        ("qwen2", "tp_size=4 num_key_value_heads=2 sequence_parallelism_mode=ring tie_word_embeddings=true"),
        ("qwen3", "tp_size=2 sp_size=2 sequence_parallelism_mode=all_to_all head_dim=8"),
        ("qwen3", "tp_size=4 num_key_value_heads=2 dp_size=2 zero_stage=3"),
        ("gemma", "tp_size=2 pp_size=2 tie_word_embeddings=true head_dim=8 num_key_value_heads=1"),
    ],
)
def test_families_equal_one_process(parity: Callable[..., Outcome], model: str, case: str) -> None:
    outcome = parity(case, model=model)
    assert outcome.ok, outcome


@pytest.mark.parametrize(
    ("model", "case"),
    [
        ("mixtral", "dp_size=4 ep_size=2 zero_stage=1"),
        ("mixtral", "tp_size=2 dp_size=2 ep_size=2 zero_stage=0 sequence_parallelism_mode=split_gather"),
        ("mixtral", "pp_size=2 dp_size=2 ep_size=2 pp_style=zbv num_model_chunks=2 zero_stage=1"),
        ("qwen3_moe", "sp_size=2 dp_size=2 ep_size=4 sequence_parallelism_mode=ring_attn zero_stage=2"),
        ("qwen3_moe", "tp_size=2 moe_intermediate_size=20 recompute=full num_key_value_heads=1"),
    ],
)
def test_experts_equal_one_process(parity: Callable[..., Outcome], model: str, case: str) -> None:
    outcome = parity(f"num_experts=4 num_experts_per_tok=2 {case}", model=model)
    assert outcome.ok, outcome


@pytest.mark.parametrize("case", ["pp_size=2 dp_size=2 zero_stage=1", "tp_size=2 dp_size=2 initial_scale=2e6"])
def test_fp16_equals_one_process(parity: Callable[..., Outcome], case: str) -> None:
    """The second one overflows first on one of its ranks, so its first update is that of a later step."""
    outcome = parity(case, precision="fp16")
    assert outcome.ok, outcome


def test_bf16_stays_within_its_rounding(parity: Callable[..., Outcome]) -> None:
    outcome = parity("tp_size=2 pp_size=2 dp_size=2 zero_stage=1", precision="bf16")
    assert outcome.ok, outcome


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        ("drop-tp-allreduce", "tp_size=2"),
        ("mean-of-means", "dp_size=2 zero_stage=1"),
        ("drop-partial-sum", "tp_size=2 pp_size=2 tie_word_embeddings=true"),
        ("zigzag-order", "sp_size=2 sequence_parallelism_mode=ring_attn"),
        ("unscaled-accumulation", "pp_size=2"),
        ("double-tied-weight", "pp_size=2 tie_word_embeddings=true"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_deliberate_fault_is_found(parity: Callable[..., Outcome], fault: str, case: str, precision: str) -> None:
    outcome = parity(case, broken=fault, precision=precision)
    assert not outcome.ok
    assert outcome.grad_rel is not None
    assert outcome.grad_rel > TOLERANCES[precision].gradient  # type: ignore[index]


def test_a_refused_case_says_why(parity: Callable[..., Outcome]) -> None:
    outcome = parity("tp_size=3")
    assert not outcome.ok
    assert outcome.loss_rel is None
    assert (outcome.reason or "").startswith("num_attention_heads 8 does not divide by tp 3")
