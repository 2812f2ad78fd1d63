"""Stop requests: any rank, any channel, any moment; the numbers go on as if nothing had been."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.faults import before_step, hold_before_step, terminate_self
from tests.support.run_folder import Run, small_recipe, write_tokens

# One worker makes the undisturbed run for all of them.
pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("preemption")]
COMPARE = Path(__file__).parents[3] / "scripts" / "compare_runs.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("made") / "data")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Run:
    run = Run.create(tmp_path_factory.mktemp("runs") / "undisturbed", small_recipe(data))
    attempt = run.start(tp=2, pp=2, dp=2)
    assert attempt.wait() == [0] * 8, attempt.log()
    return run


def compare(first: Run, second: Run) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(COMPARE), str(first.dir.path), str(second.dir.path)]
    env = {"PYTHONPATH": str(COMPARE.parents[1])}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def test_two_preemptions_change_no_bit(tmp_path: Path, data: Path, undisturbed: Run) -> None:
    run = Run.create(tmp_path / "run", small_recipe(data))
    told = tmp_path / "told"
    first = run.start(tp=2, pp=2, dp=2, fault=hold_before_step(told, rank=1, step=4))
    first.wait_for_step(3)
    first.signal(signal.SIGUSR2, rank=5)
    told.touch()
    assert first.wait() == [0] * 8, first.log()
    assert first.outcome()["kind"] == "preempted"
    assert first.outcome()["reason"] == "signal SIGUSR2"
    stopped_at = first.outcome()["step"]
    assert 3 <= stopped_at < 12
    assert [step for step, _ in run.losses()] == list(range(1, stopped_at + 1))

    # The second request comes on every rank before the same step, twice, and once more in the save.
    second = run.start(tp=2, pp=2, dp=2, fault=before_step(terminate_twice, rank=2, step=stopped_at + 1))
    assert second.wait() == [0] * 8, second.log()
    assert second.outcome()["step"] == stopped_at + 1
    assert "SIGTERM" in second.outcome()["reason"]

    assert run.start(tp=2, pp=2, dp=2).wait() == [0] * 8
    result = compare(undisturbed, run)
    assert (result.returncode, result.stdout) == (0, "metrics: equal\ncheckpoint: equal\n"), result.stderr
    assert {line["attempt"] for line in run.metrics()} == {0, 1, 2}


def terminate_twice() -> None:
    terminate_self()
    terminate_self()


def test_compare_runs_sees_another_seed(tmp_path: Path, data: Path, undisturbed: Run) -> None:
    run = Run.create(tmp_path / "run", small_recipe(data, training={"seed": 43}))
    assert run.start().wait() == [0]
    result = compare(undisturbed, run)
    assert result.returncode == 1
    assert "metrics: step 1: loss is" in result.stdout
    assert "checkpoint: lm_head.weight differs" in result.stdout or "checkpoint: model" in result.stdout


def test_stop_file_is_obeyed_once(tmp_path: Path, data: Path) -> None:
    # So many steps take much longer than rank 0 takes to look for the file.
    run = Run.create(tmp_path / "run", small_recipe(data, training={"steps": 100_000}))
    attempt = run.start()
    attempt.wait_for_step(2)
    run.dir.stop.touch()
    assert attempt.wait() == [0]
    assert attempt.outcome()["reason"] == "stop file"
    assert attempt.outcome()["step"] >= 2
    assert not run.dir.stop.exists()


def test_request_during_setup_leaves_before_the_first_step(tmp_path: Path, data: Path) -> None:
    run = Run.create(tmp_path / "run", small_recipe(data))
    attempt = run.start(dp=2, fault=terminate_rank_1)
    assert attempt.wait() == [0, 0], attempt.log()
    assert (attempt.outcome()["kind"], attempt.outcome()["step"]) == ("preempted", 0)
    assert "during set-up" in attempt.outcome()["reason"]
    assert not run.dir.metrics.exists()


def terminate_rank_1(rank: int) -> None:
    if rank == 1:
        terminate_self()


def test_finished_run_is_left_alone(tmp_path: Path, undisturbed: Run) -> None:
    attempt = undisturbed.start()
    assert attempt.wait() == [0]
    assert "finished already" in attempt.log()
    assert not attempt.dir.outcome.exists()
