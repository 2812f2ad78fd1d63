"""The learning rate is a pure function of the step."""

from __future__ import annotations

import pytest

from hpjob.recipe.model import OptimizerSettings
from hpjob.runtime.optimizer.schedule import learning_rate


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_warm_up_then_decay_to_the_lowest(schedule: str) -> None:
    settings = OptimizerSettings(lr=1.0, warmup_steps=4, min_lr_ratio=0.1, schedule=schedule)  # type: ignore[arg-type]
    rates = [learning_rate(settings, step, 24) for step in range(1, 25)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[13] == pytest.approx(0.55)  # half-way
    assert rates[-1] == pytest.approx(0.1)
    assert learning_rate(settings, 30, 24) == pytest.approx(0.1)


def test_constant() -> None:
    settings = OptimizerSettings(lr=1.0, schedule="constant")
    assert {learning_rate(settings, step, 5) for step in range(1, 6)} == {1.0}


def test_warm_up_longer_than_the_run() -> None:
    settings = OptimizerSettings(lr=1.0, warmup_steps=10)
    assert learning_rate(settings, 5, 5) == 0.5
