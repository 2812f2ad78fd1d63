"""A spoiled step in a real run: left out on all ranks, the same after a resume; or the end of the run."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from math import isfinite, nan
from pathlib import Path

import pytest

from hpjob.core.run_records import first_failure, read_failures
from tests.support.faults import Fault, before_step, spoil_loss, terminate_self
from tests.support.run_folder import Run, small_recipe, write_tokens

pytestmark = pytest.mark.distributed
COMPARE = Path(__file__).parents[3] / "scripts" / "compare_runs.py"
SPOIL = partial(spoil_loss, steps=(4, 6), factor=nan)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("made") / "data")


def both(*faults: Fault) -> Fault:
    return partial(_all_of, faults)


def _all_of(faults: tuple[Fault, ...], rank: int) -> None:
    for fault in faults:
        fault(rank)


def make(path: Path, data: Path, policy: str) -> Run:
    return Run.create(path, small_recipe(data, training={"steps": 8}, loss_watch={"nan": policy}))


def test_steps_that_are_no_numbers_are_left_out_also_after_a_resume(tmp_path: Path, data: Path) -> None:
    whole = make(tmp_path / "whole", data, "skip")
    attempt = whole.start(tp=2, dp=2, fault=SPOIL)
    assert attempt.wait() == [0] * 4, attempt.log()
    lines = {line["step"]: line for line in whole.metrics()}
    assert [step for step, line in lines.items() if line.get("skipped")] == [4, 6]
    assert lines[4]["fault"] == lines[4]["skipped"] == "nan"
    assert all(isfinite(lines[step]["loss"]) for step in (5, 7, 8))
    faults = [event for event in attempt.events() if event["event"] == "loss-fault"]
    assert [(event["step"], event["positions"], event["policy"]) for event in faults] == [
        (4, [24, 31], "skip"),
        (6, [40, 47], "skip"),
    ]

    parts = make(tmp_path / "parts", data, "skip")
    first = parts.start(tp=2, dp=2, fault=both(SPOIL, before_step(terminate_self, rank=1, step=5)))
    assert first.wait() == [0] * 4, first.log()
    assert first.outcome()["kind"] == "preempted"
    assert parts.start(tp=2, dp=2, fault=SPOIL).wait() == [0] * 4
    command = [sys.executable, str(COMPARE), str(whole.dir.path), str(parts.dir.path)]
    env = {"PYTHONPATH": str(COMPARE.parents[1])}
    compared = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert "checkpoint: equal" in compared.stdout, compared.stdout + compared.stderr
    assert [line.get("skipped") for line in parts.metrics()] == [line.get("skipped") for line in whole.metrics()]


def test_the_default_is_to_stop_with_step_and_samples(tmp_path: Path, data: Path) -> None:
    checkpoint = {"every_steps": 2, "asynchronous": False}
    run = Run.create(tmp_path / "run", small_recipe(data, training={"steps": 8}, checkpoint=checkpoint))
    attempt = run.start(dp=2, fault=SPOIL)
    assert attempt.wait() == [2, 2], attempt.log()
    first = first_failure(read_failures(attempt.dir))
    assert first is not None
    assert (first.kind, first.step, first.exception) == ("exception", 4, "LossFaultError")
    assert "step 4 (samples 24 to 31): the loss is nan" in first.message
    assert attempt.outcome()["kind"] == "failed"
    assert run.checkpoint_names()[-1] == "step-00000002"
