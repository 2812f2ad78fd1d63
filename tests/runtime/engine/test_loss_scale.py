"""Dynamic loss scale."""

from __future__ import annotations

from math import inf, nan

import pytest

from hpjob.runtime.optimizer.loss_scale import GROWTH_INTERVAL, LossScale


@pytest.mark.parametrize("overflow", [inf, nan])
def test_an_overflow_halves_the_scale_and_starts_counting_again(overflow: float) -> None:
    scale = LossScale(1024.0)
    for _ in range(GROWTH_INTERVAL - 1):
        assert scale.accepts(1.0)
    assert not scale.accepts(overflow)
    assert scale.value == 512.0
    for _ in range(GROWTH_INTERVAL - 1):
        assert scale.accepts(1.0)
    assert scale.value == 512.0
    assert scale.accepts(1.0)
    assert scale.value == 1024.0


def test_the_scale_stays_within_its_bounds() -> None:
    scale = LossScale(1.0)
    assert not scale.accepts(inf)
    assert scale.value == 1.0


def test_a_resumed_scale_goes_on_counting() -> None:
    first, second = LossScale(8.0), LossScale(2.0)
    for _ in range(GROWTH_INTERVAL - 1):
        first.accepts(1.0)
    second.load_state_dict(first.state_dict())
    second.accepts(1.0)
    assert second.value == 16.0
