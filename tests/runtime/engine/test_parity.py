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


def test_bf16_stays_within_its_rounding(parity: Callable[..., Outcome]) -> None:
    outcome = parity("tp_size=2 pp_size=2 dp_size=2 zero_stage=1", precision="bf16")
    assert outcome.ok, outcome


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        ("drop-tp-allreduce", "tp_size=2"),
        ("mean-of-means", "dp_size=2 zero_stage=1"),
        ("drop-partial-sum", "tp_size=2 pp_size=2 tie_word_embeddings=true"),
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
