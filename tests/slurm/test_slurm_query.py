"""State of a job in words."""

from __future__ import annotations

import pytest

from hpjob.slurm.controller_view import ask_controller
from hpjob.slurm.query import job_state, reason_words
from tests.support.fake_slurm import FakeSlurm


@pytest.mark.parametrize(
    ("line", "phase", "words"),
    [
        ("PENDING|Resources||2026-03-01T12:00:00|1:00", "waiting", "waiting in the queue: its nodes are in use"),
        ("PENDING|BeginTime||N/A|1:00", "waiting", "a job that was queued again waits about two minutes"),
        ("RUNNING|None|n[1-2]|2026-03-01T12:00:00|59:00", "running", "running"),
        ("COMPLETING|None|n1|N/A|", "ending", "its last processes are ending"),
        ("TIMEOUT|TimeLimit|n1|N/A|", "stopped", "reached its time limit"),
        ("NODE_FAIL|NodeDown|n1|N/A|", "stopped", "lost a node"),
        ("CANCELLED by 1000|None|n1|N/A|", "stopped", "cancelled"),
        ("SOMETHING_NEW|None|n1|N/A|", "unknown", "SOMETHING_NEW"),
    ],
)
def test_states_in_words(fake_slurm: FakeSlurm, line: str, phase: str, words: str) -> None:
    fake_slurm.answer("squeue", line + "\n")
    state = job_state("7")
    assert state.phase == phase
    assert words in state.words


def test_expected_start_and_time_left(fake_slurm: FakeSlurm) -> None:
    assert job_state("7").starts_at == "2026-03-01T12:00:00"
    fake_slurm.answer("squeue", "RUNNING|None|n1|2026-03-01T12:00:00|59:00\n")
    state = job_state("7")
    assert (state.starts_at, state.time_left, state.nodes) == (None, "59:00", "n1")


@pytest.mark.parametrize("gone", [("", "slurm_load_jobs error: Invalid job id specified", 1), ("", "", 0)])
def test_a_gone_job_is_asked_from_sacct(fake_slurm: FakeSlurm, gone: tuple[str, str, int]) -> None:
    fake_slurm.answer("squeue", gone[0], stderr=gone[1], code=gone[2])
    fake_slurm.answer("sacct", "OUT_OF_MEMORY|None|n[1-2]\n")
    state = job_state("7")
    assert (state.phase, state.state) == ("stopped", "OUT_OF_MEMORY")
    assert not state.is_live
    assert "--starttime=1970-01-01" in fake_slurm.calls("sacct")[0]


def test_a_gone_job_without_accounting_is_lost(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", stderr="slurm_load_jobs error: Invalid job id specified", code=1)
    fake_slurm.answer("sacct", stderr="Slurm accounting storage is disabled", code=1)
    state = job_state("7")
    assert (state.phase, state.is_live) == ("lost", False)


def test_a_silent_controller_is_not_a_lost_job(fake_slurm: FakeSlurm) -> None:
    """Taking silence for an end would let a second job into the run folder."""
    fake_slurm.answer("squeue", stderr="Unable to contact slurm controller", code=1)
    state = job_state("7")
    assert (state.phase, state.is_live) == ("unknown", True)
    assert "Unable to contact" in state.words


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("(Priority)", "jobs of higher priority are before it"),
        ("QOSMaxJobsPerUserLimit", "quality of service is reached (QOSMaxJobsPerUserLimit)"),
        ("AssocGrpGRES", "limit of its account is reached"),
        ("launch failed requeued held", "scontrol release"),
        ("ReqNodeNotAvail, UnavailableNodes:n3", "UnavailableNodes:n3"),
        ("BrandNewReason", "BrandNewReason"),
    ],
)
def test_reasons_in_words(reason: str, words: str) -> None:
    assert words in reason_words(reason)


_ENDING = "JobId=7 JobState=COMPLETING Restarts={restarts} RunTime={ran} TimeLimit={limit} PreemptTime={preempted}\n"


@pytest.mark.parametrize(
    ("shown", "cancelled"),
    [
        (_ENDING.format(restarts=1, ran="00:10:00", limit="01:00:00", preempted="None"), True),
        (_ENDING.format(restarts=1, ran="00:10:00", limit="UNLIMITED", preempted="None"), True),
        (_ENDING.format(restarts=2, ran="00:10:00", limit="01:00:00", preempted="None"), False),
        (_ENDING.format(restarts=1, ran="01:00:12", limit="01:00:00", preempted="None"), False),
        (_ENDING.format(restarts=1, ran="00:10:00", limit="01:00:00", preempted="2026-03-01T10:00:00"), False),
        ("JobId=7 JobState=COMPLETING Restarts=1 ExitCode=0:9\n", False),
        ("JobId=7 JobState=RUNNING Restarts=1\n", False),
        ("JobId=7 JobState=CANCELLED Restarts=1\n", True),
    ],
)
def test_a_cancelled_job_is_told_from_others_that_end(fake_slurm: FakeSlurm, shown: str, cancelled: bool) -> None:
    fake_slurm.answer("scontrol show job", shown)
    view = ask_controller("7")
    assert view is not None and view.looks_cancelled(restart_count=1) is cancelled
