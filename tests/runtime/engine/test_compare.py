"""What a comparison of a layout with the reference lets pass."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from hpjob.runtime.parallel.region import Region
from hpjob.runtime.parity.case import parse_case
from hpjob.runtime.parity.compare import compare_case
from hpjob.runtime.parity.reference import Trajectory
from hpjob.runtime.parity.worker import RankRecord

STEPS = 40
WEIGHT = torch.full((4, 4), 2.0)


class OneRank:
    """Trains nothing and answers with a record whose figures are off by given parts."""

    def __init__(self, *, loss: float, gradient: float, weight: float = 0.0) -> None:
        part = Region.whole(tuple(WEIGHT.shape))
        self._record = RankRecord(
            losses=[3.0 * (1 + loss)] * STEPS,
            skipped=[],
            gradients=[("weight", part, WEIGHT * (1 + gradient))],
            weights=[("weight", part, WEIGHT * (1 + weight))],
        )

    def run(self, *_: Any, **__: Any) -> list[RankRecord]:
        """Return the record, whatever is asked for."""
        return [self._record]


def is_ok(text: str, **off: float) -> bool:
    reference = Trajectory(losses=[3.0] * STEPS, skipped=[], gradients={"weight": WEIGHT}, weights={"weight": WEIGHT})
    case = parse_case(text, world=1, steps=STEPS)
    return compare_case(cast("Any", OneRank(**off)), case, reference, STEPS, None).ok


@pytest.mark.parametrize(
    ("text", "gradient", "weight"),
    [
        ("precision=fp32", 1e-5, 1e-4),
        ("precision=fp16", 5e-3, 2 * 5e-3),
        ("precision=bf16", 3e-2, 2 * 1e-2),
        ("precision=bf16 use_fp8=true", 2e-1, 2 * 2e-2),
        ("precision=fp32 use_fp8=true", 2e-1, 2 * 2e-2),
    ],
)
def test_each_precision_has_its_limit(text: str, gradient: float, weight: float) -> None:
    assert is_ok(text, loss=0.0, gradient=0.9 * gradient, weight=0.9 * weight)
    assert not is_ok(text, loss=0.0, gradient=1.1 * gradient)
    assert not is_ok(text, loss=0.0, gradient=0.0, weight=1.1 * weight)


@pytest.mark.parametrize("text", ["precision=bf16", "precision=bf16 use_fp8=true"])
def test_the_mean_loss_at_the_end_has_one_limit_for_all(text: str) -> None:
    assert is_ok(text, loss=0.0045, gradient=0.0)
    assert not is_ok(text, loss=0.0055, gradient=0.0)
