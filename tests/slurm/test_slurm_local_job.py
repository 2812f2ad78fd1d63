"""The local executor: real processes, a stand-in for the runtime."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import first_failure, read_failures, read_json
from hpjob.slurm.cancel import cancel
from hpjob.slurm.live import live_submissions, local_process, read_submissions, submission_state
from hpjob.slurm.local_job import rank_environment
from hpjob.slurm.submit import submit
from tests.support.runs import make_run, trained_in
from tests.support.slurm_sandbox import wait_for, wait_until_nothing_runs


def start(folder: Path, **behaviour: object) -> RunDir:
    prepared = make_run(folder, **behaviour)  # type: ignore[arg-type]
    submit(prepared.run, "local", prepared.spec, prepared.script)
    return prepared.run


def wait_until_ended(run: RunDir) -> None:
    (submission,) = read_submissions(run)
    wait_for(lambda: not submission_state(submission).is_live, "the local job has ended")


def wait_until_training(run: RunDir, attempt: int = 0) -> None:
    """Wait for all ranks, each of which takes signals then, and for the first step."""
    logs = [run.attempt(attempt).rank_log(rank) for rank in range(8)]
    wait_for(
        lambda: all(log.exists() and "of 8 on" in log.read_text() for log in logs) and trained_in(run, attempt),
        f"attempt {attempt} trains",
    )


@pytest.fixture
def patient_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving takes as long as it takes."""
    monkeypatch.setattr("hpjob.slurm.cancel.LOCAL_GRACE_S", 240.0)


def decision(attempt: AttemptDir) -> object:
    return (read_json(attempt.end) or {}).get("decision")


def test_a_run_trains_to_its_end(tmp_path: Path) -> None:
    run = start(tmp_path / "run")
    wait_until_ended(run)
    assert run.finished.exists()
    (attempt,) = run.attempt_list()
    assert attempt.hosts.read_text().split() == ["local-0"] * 4 + ["local-1"] * 4
    assert "rank 5 of 8 on local-1" in attempt.rank_log(5).read_text()
    assert decision(attempt) == "done"
    exits = read_json(attempt.exits)
    assert exits is not None and [rank["exit_code"] for rank in exits["ranks"]] == [0] * 8


def test_a_preempted_run_goes_on_by_itself(tmp_path: Path) -> None:
    run = start(tmp_path / "run", steps=20, held=1)
    wait_until_training(run)
    launcher = json.loads(run.attempt(0).launcher.read_text())["pid"]
    os.kill(launcher, signal.SIGUSR2)
    wait_until_ended(run)
    assert run.finished.exists()
    first, second = run.attempt_list()
    assert (decision(first), decision(second)) == ("requeue", "done")
    steps = [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]
    assert steps == list(range(1, 21))
    begun = read_json(second.attempt_json)
    assert begun is not None and begun["restart_count"] == 1 and begun["checkpoint_step"] > 0


@pytest.mark.parametrize("how", ["raise_rank", "kill_rank", "exit_rank"])
def test_one_failing_rank_ends_the_job_and_is_named(tmp_path: Path, how: str) -> None:
    run = start(tmp_path / "run", steps=100_000, **{how: 6})
    wait_until_ended(run)
    (attempt,) = run.attempt_list()
    assert decision(attempt) == "stop"
    failure = first_failure(read_failures(attempt))
    assert failure is not None and (failure.rank, failure.node) == (6, "local-1")
    assert failure.kind == ("killed" if how == "kill_rank" else "exception")
    wait_until_nothing_runs(run.path)


def test_the_job_outlives_the_shell_that_started_it(tmp_path: Path) -> None:
    run = start(tmp_path / "run", steps=100_000)
    (submission,) = read_submissions(run)
    controller = local_process(submission)
    assert controller is not None
    assert os.getsid(controller.pid) == controller.pid != os.getsid(0)
    cancel(run, [submission])
    wait_until_nothing_runs(run.path)


@pytest.mark.usefixtures("patient_cancel")
def test_cancel_lets_the_ranks_save_and_leaves_nothing(tmp_path: Path) -> None:
    run = start(tmp_path / "run", steps=100_000, step_s=0.1)
    wait_until_training(run)
    cancel(run, [submission for submission, _ in live_submissions(run)])
    wait_until_nothing_runs(run.path)
    (attempt,) = run.attempt_list()
    assert decision(attempt) == "stop"
    assert list(run.checkpoints.glob("step-*/manifest.json"))


def test_ranks_die_with_their_launcher(tmp_path: Path) -> None:
    run = start(tmp_path / "run", steps=100_000)
    wait_until_training(run)
    launcher = psutil.Process(json.loads(run.attempt(0).launcher.read_text())["pid"])
    ranks = launcher.children(recursive=True)
    assert len(ranks) >= 8
    launcher.kill()
    _, alive = psutil.wait_procs(ranks, timeout=240)
    assert not alive
    wait_until_ended(run)


def test_three_attempts_without_progress_end_the_run(tmp_path: Path) -> None:
    """A job that is told to stop before each first checkpoint would go round for ever."""
    run = start(tmp_path / "run", steps=100_000, saves_nothing=1)
    for attempt in range(3):
        wait_until_training(run, attempt)
        os.kill(json.loads(run.attempt(attempt).launcher.read_text())["pid"], signal.SIGTERM)
    wait_until_ended(run)
    assert [decision(attempt) for attempt in run.attempt_list()] == ["requeue", "requeue", "stop"]
    end = read_json(run.attempt(2).end)
    assert end is not None and "without a new checkpoint" in end["reason"]


@pytest.mark.usefixtures("patient_cancel")
@pytest.mark.parametrize("after_s", [0, 4])
def test_the_time_limit_is_announced_before_it_ends_the_attempt(tmp_path: Path, after_s: int) -> None:
    """However little has started by then; the limit itself is minutes away."""
    changes = {"time_limit_s": 600 + after_s, "signal_lead_s": 600}
    run = start(tmp_path / "run", steps=100_000, spec_changes=changes)
    wait_for(run.attempt(0).end.exists, "first attempt ended")
    assert decision(run.attempt(0)) == "requeue"
    cancel(run, [submission for submission, _ in live_submissions(run)])


def test_a_job_around_us_does_not_number_the_ranks() -> None:
    environment = rank_environment({"SLURM_PROCID": "3", "OMP_NUM_THREADS": "2", "HOME": "/h"}, {"NCCL_DEBUG": "INFO"})
    assert environment == {"OMP_NUM_THREADS": "2", "HOME": "/h", "PYTHONUNBUFFERED": "1", "NCCL_DEBUG": "INFO"}
