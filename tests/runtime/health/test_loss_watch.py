"""Losses that are unusual: what counts as such, what the policies do, and that a resume repeats it."""

from __future__ import annotations

import json
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from hpjob.recipe.model import LossWatchSettings
from hpjob.runtime.engine import StepResult
from hpjob.runtime.health.loss_watch import MOST_SKIPS, LossFaultError, LossWatch, as_fields, read_history

SMOOTH = [3.0 - 0.01 * i + 0.02 * (i % 3) for i in range(40)]


def result(loss: float, norm: float = 1.0, *, updated: bool = True) -> StepResult:
    return StepResult(loss=loss, grad_norm=norm, num_tokens=8, lr=1e-3, updated=updated)


def watch(history: list[float] = SMOOTH, half_precision: bool = False, **settings: Any) -> LossWatch:
    return LossWatch(LossWatchSettings(**settings), history=history, half_precision=half_precision)


def test_usual_losses_are_no_finding() -> None:
    losses = watch([])
    assert [losses.take(result(loss)) for loss in SMOOTH] == [None] * 40
    assert losses.take(result(2.7)) is None
    assert losses.take(result(0.1)) is None  # far below is no spike


def test_a_spike_is_told_with_how_far_it_is() -> None:
    finding = watch().take(result(6.0))
    assert finding is not None
    assert (finding.kind, finding.policy) == ("spike", "go_on")
    assert finding.usual == pytest.approx(2.82, abs=0.05) and finding.z is not None and finding.z > 8
    assert "robust deviations above the usual" in finding.words


def test_too_little_history_calls_nothing_a_spike() -> None:
    assert watch(SMOOTH[:15]).take(result(100.0)) is None


def test_a_straight_line_makes_no_bump_a_spike() -> None:
    assert watch([2.0] * 40).take(result(2.02)) is None
    assert watch([2.0] * 40).take(result(2.2)) is not None


@pytest.mark.parametrize(("loss", "norm"), [(nan, 1.0), (inf, 1.0), (2.7, nan), (2.7, inf)])
def test_what_is_no_number(loss: float, norm: float) -> None:
    finding = watch().take(result(loss, norm))
    assert finding is not None and (finding.kind, finding.policy) == ("nan", "stop")


def test_an_overflow_of_scaled_gradients_is_the_loss_scales_business() -> None:
    assert watch(half_precision=True).take(result(2.7, inf, updated=False)) is None
    assert watch(half_precision=True).take(result(nan, nan, updated=False)) is not None
    assert as_fields(None, result(2.7, inf, updated=False)) == {"skipped": "overflow"}


def test_policies() -> None:
    spike = result(6.0)
    going_on, skipping, stopping = watch(), watch(spike="skip"), watch(spike="stop")
    assert [w.accepts(6.0, 1.0) for w in (going_on, skipping, stopping)] == [True, False, True]
    assert [w.decides_updates for w in (going_on, skipping, stopping)] == [False, True, False]
    for losses in (going_on, skipping):
        finding = losses.take(spike)
        assert finding is not None
        losses.check(finding, 41, (320, 327))
    finding = stopping.take(spike)
    assert finding is not None
    with pytest.raises(LossFaultError, match=r"step 41 \(samples 320 to 327\): the loss is 6.0000") as caught:
        stopping.check(finding, 41, (320, 327))
    assert "loss_watch.spike: skip" in caught.value.hint


def test_nothing_but_skips_is_no_training() -> None:
    losses = watch(spike="skip")
    for step in range(1, MOST_SKIPS + 1):
        finding = losses.take(result(6.0))
        assert finding is not None
        if step < MOST_SKIPS:
            losses.check(finding, step, (0, 1))
    with pytest.raises(LossFaultError, match="10 steps in a row"):
        losses.check(finding, MOST_SKIPS, (0, 1))


def test_a_resumed_run_judges_as_one_that_never_stopped(tmp_path: Path) -> None:
    series = [*SMOOTH, 6.0, 2.7, nan, 6.0, 6.0, 2.6, 5.0]
    settings = {"spike": "skip", "nan": "skip", "window": 32}
    whole, lines = watch([], **settings), []
    expected = []
    for step, loss in enumerate(series, start=1):
        updated = whole.accepts(loss, 1.0)
        done = result(loss, updated=updated)
        finding = whole.take(done)
        expected.append(finding and finding.kind)
        lines.append(json.dumps({"step": step, "loss": loss, **as_fields(finding, done)}))
    assert expected[40:] == ["spike", None, "nan", "spike", "spike", None, "spike"]
    for stop in (40, 41, 43, 45):
        metrics = tmp_path / f"{stop}.jsonl"
        metrics.write_text("\n".join(lines[:stop]) + "\n")
        history, skips = read_history(metrics, 32)
        resumed = LossWatch(LossWatchSettings(**settings), history=history, skips=skips)
        again = [resumed.take(result(loss)) for loss in series[stop:]]
        assert [finding and finding.kind for finding in again] == expected[stop:]
        assert skips == {40: 0, 41: 1, 43: 1, 45: 3}[stop]
