"""Layouts give the numbers of one plain process; deliberate faults do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hpjob.runtime.parity.compare import TOLERANCES, Outcome
from tests.runtime.engine.coverage import lines_of

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("case", lines_of("ci.yaml"))
def test_layouts_equal_one_process(parity: Callable[..., Outcome], case: str) -> None:
    outcome = parity(case)
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
