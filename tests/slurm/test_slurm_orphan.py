"""Jobs whose script cannot queue them again, on a fake Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import read_json, write_json
from hpjob.slurm.orphan import guard, requeue_orphan
from tests.support.fake_slurm import FakeSlurm
from tests.support.slurm_sandbox import wait_for

GONE = 2**22 + 1
"""Above every process number."""


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    attempt = RunDir(tmp_path).attempt(0)
    attempt.path.mkdir(parents=True)
    write_json(attempt.attempt_json, {"job_id": "7", "restart_count": 0, "executor": "slurm", "checkpoint_step": 0})
    return attempt


def requeued(attempt: AttemptDir, fake: FakeSlurm, text: str, shell: int = GONE) -> bool:
    fake.answer("scontrol show job", f"JobId=7 {text}\n")
    fake.answer("scontrol requeue")
    done = requeue_orphan(RunDir(attempt.path.parent.parent), attempt, shell)
    assert ("requeue 7" in fake.calls("scontrol")) is done
    return done


def test_a_killed_shell(attempt: AttemptDir, fake_slurm: FakeSlurm) -> None:
    assert requeued(attempt, fake_slurm, "JobState=COMPLETING Restarts=0 ExitCode=0:9 PreemptTime=None")
    end = read_json(attempt.end)
    assert end is not None and end["decision"] == "requeue" and "shell was killed" in end["reason"]


def test_a_time_limit_that_leaves_no_time(attempt: AttemptDir, fake_slurm: FakeSlurm) -> None:
    """The ranks are still saving: what they reach is for the script to say, if it still can."""
    text = "JobState=COMPLETING Reason=TimeLimit Restarts=0 ExitCode=0:0 PreemptTime=None"
    assert requeued(attempt, fake_slurm, text, shell=os.getpid())
    assert not attempt.end.exists()


@pytest.mark.parametrize(
    "text",
    [
        "JobState=COMPLETING Restarts=0 ExitCode=0:0 PreemptTime=None",
        "JobState=CANCELLED Restarts=0 ExitCode=0:15 PreemptTime=None",
        "JobState=COMPLETING Restarts=1 ExitCode=0:9 PreemptTime=None",
        "JobState=COMPLETING Restarts=0 ExitCode=0:9 PreemptTime=2026-03-01T10:00:00",
        "JobState=FAILED Restarts=0 ExitCode=1:0 PreemptTime=None",
    ],
)
def test_other_ends_are_left_alone(attempt: AttemptDir, fake_slurm: FakeSlurm, text: str) -> None:
    assert not requeued(attempt, fake_slurm, text)


def test_a_preempted_job_whose_shell_lives_is_left_alone(attempt: AttemptDir, fake_slurm: FakeSlurm) -> None:
    text = "JobState=RUNNING Restarts=0 ExitCode=0:0 PreemptTime=2026-03-01T10:00:00"
    assert not requeued(attempt, fake_slurm, text, shell=os.getpid())


def test_a_cancelled_run_stays_stopped(attempt: AttemptDir, fake_slurm: FakeSlurm) -> None:
    RunDir(attempt.path.parent.parent).cancelled.touch()
    assert not requeued(attempt, fake_slurm, "JobState=COMPLETING Restarts=0 ExitCode=0:9 PreemptTime=None")


def test_three_times_without_progress_stop(attempt: AttemptDir, fake_slurm: FakeSlurm) -> None:
    run = RunDir(attempt.path.parent.parent)
    for index in (1, 2):
        run.attempt(index).path.mkdir()
        write_json(run.attempt(index).attempt_json, read_json(attempt.attempt_json) or {})
    assert not requeued(run.attempt(2), fake_slurm, "JobState=COMPLETING Restarts=0 ExitCode=0:9 PreemptTime=None")
    assert (read_json(run.attempt(2).end) or {})["decision"] == "stop"


def test_the_guard_waits_for_the_end_of_the_shell(attempt: AttemptDir, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol show job", "JobId=7 JobState=COMPLETING Restarts=0 ExitCode=0:9 PreemptTime=None\n")
    fake_slurm.answer("scontrol requeue")
    handler = signal.getsignal(signal.SIGTERM)
    assert guard(RunDir(attempt.path.parent.parent), attempt, GONE)
    assert "requeue 7" in fake_slurm.calls("scontrol")
    assert signal.getsignal(signal.SIGTERM) is handler


def test_term_makes_the_guard_look_while_the_shell_lives(attempt: AttemptDir, fake_slurm: FakeSlurm) -> None:
    """The job script starts it with TERM ignored, which may come before Python is up."""
    text = "JobId=7 JobState=COMPLETING Reason=TimeLimit Restarts=0 ExitCode=0:0 PreemptTime=None\n"
    fake_slurm.answer("scontrol show job", text)
    fake_slurm.answer("scontrol requeue")
    command = [sys.executable, "-m", "hpjob.slurm.attempt", "guard", "--run-dir", str(attempt.path.parent.parent)]
    command += ["--attempt-dir", str(attempt.path), "--shell-pid", str(os.getpid())]
    started = ["bash", "-c", 'trap "" TERM; echo; exec "$@"', "guard", *command]
    process = subprocess.Popen(started, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"\n"

    def ended() -> bool:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        return process.poll() is not None

    wait_for(ended, "the guard has ended", timeout=180)
    assert process.communicate()[0] == b"requeued\n" and process.returncode == 0
    assert "requeue 7" in fake_slurm.calls("scontrol")
