"""Begin and end of an attempt, on a fake Slurm."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hpjob.core.errors import EnvironmentProblemError
from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import first_failure, read_failures, read_json, write_json
from hpjob.slurm import rescue
from hpjob.slurm.attempt import main
from hpjob.slurm.attempt_begin import read_plan
from hpjob.slurm.lead import measured_step_s, signal_lead_s
from hpjob.slurm.master_address import master_address
from hpjob.topology.slurm import cluster_topology
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import make_run


@pytest.fixture
def run(tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run of two nodes, inside job 7 that got n1 and n2."""
    prepared = make_run(tmp_path / "run", topology=cluster_topology("batch", 2), executor="slurm")
    for name, value in (("SLURM_JOB_ID", "7"), ("SLURM_JOB_NODELIST", "n[1-2]"), ("SLURM_JOB_PARTITION", "batch")):
        monkeypatch.setenv(name, value)
    return prepared.run


def test_stop_signals_are_ignored_while_the_decision_is_made_and_not_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm may end the job meanwhile; what this process starts later must not inherit it."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    during: list[object] = []

    def decide(*_: object) -> str:
        during.extend(signal.getsignal(number) for number in numbers)
        return "stop"

    monkeypatch.setattr("hpjob.slurm.attempt_end.end_attempt", decide)
    folders = ["--run-dir", str(tmp_path), "--attempt-dir", str(tmp_path)]
    assert main(["end", *folders, "--exit-code", "1"]) == 0
    assert during == [signal.SIG_IGN] * 3
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.SIG_IGN not in before


def begin(run: RunDir, capsys: pytest.CaptureFixture[str]) -> AttemptDir:
    assert main(["begin", "--run-dir", str(run.path)]) == 0
    return AttemptDir(Path(capsys.readouterr().out.strip()))


def end(run: RunDir, attempt: AttemptDir, code: int, capsys: pytest.CaptureFixture[str]) -> str:
    arguments = ["end", "--run-dir", str(run.path), "--attempt-dir", str(attempt.path), "--exit-code", str(code)]
    assert main(arguments) == 0
    return capsys.readouterr().out.strip()


def preempted(attempt: AttemptDir, step: int = 5, reason: str = "signal SIGTERM") -> None:
    write_json(attempt.outcome, {"kind": "preempted", "step": step, "reason": reason, "time": time.time()})


def job(fake: FakeSlurm, state: str, **fields: Any) -> None:
    shown = {"JobState": state, "Restarts": 0, "RunTime": "00:10:00", "TimeLimit": "01:00:00", "PreemptTime": "None"}
    text = " ".join(f"{name}={value}" for name, value in (shown | fields).items())
    fake.answer("scontrol show job", f"JobId=7 {text}\n")


def test_begin_writes_what_the_ranks_need(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    attempt = begin(run, capsys)
    assert attempt.path == run.attempts / "0000"
    assert attempt.hosts.read_text().split() == ["n1"] * 4 + ["n2"] * 4
    document = read_json(attempt.attempt_json)
    assert document is not None
    assert (document["job_id"], document["world_size"], document["master_addr"]) == ("7", 8, "10.0.0.1")
    assert document["hostnames"] == ["n1", "n2"] and document["site"]["kill_wait_s"] == 30
    assert attempt.plan.exists() and attempt.topology.exists() and attempt.failures.is_dir()


def test_each_start_has_its_own_folder(
    run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(run, capsys)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    attempt = begin(run, capsys)
    document = read_json(attempt.attempt_json)
    assert attempt.index == 1 and document is not None and document["restart_count"] == 1


def test_begin_outside_a_job(run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    assert main(["begin", "--run-dir", str(run.path)]) == 3
    assert "this is no Slurm job" in caplog.text and not run.attempt_list()


def test_begin_while_another_job_runs(
    run: RunDir,
    fake_slurm: FakeSlurm,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    begin(run, capsys)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    fake_slurm.answer("squeue", "RUNNING|None|n[1-2]|N/A|1:00\n")
    assert main(["begin", "--run-dir", str(run.path)]) == 2
    assert "already running in job 7" in caplog.text
    fake_slurm.answer("squeue", "FAILED|None|n[1-2]|N/A|1:00\n")
    assert main(["begin", "--run-dir", str(run.path)]) == 0


def test_begin_with_other_nodes_never_changes_the_batch(
    run: RunDir, fake_slurm: FakeSlurm, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = run.recipe.read_text(encoding="utf-8")
    run.recipe.write_text(recipe.replace("global_batch_size: 16", "global_batch_size: 32"), encoding="utf-8")
    fake_slurm.answer("scontrol show hostnames", "n1\n")
    assert main(["begin", "--run-dir", str(run.path)]) == 4
    assert "the plan is for 2 nodes, Slurm gave 1" in caplog.text and "order of its data" in caplog.text
    assert not run.attempt_list()


def test_begin_with_other_nodes_plans_anew_and_says_which_fixed_values_went(
    run: RunDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    before = read_plan(run.plan)
    fake_slurm.answer("scontrol show hostnames", "n1\n")
    attempt = begin(run, capsys)
    plan = read_plan(attempt.plan)
    assert (plan.num_nodes, plan.degrees.world_size) == (1, 4)
    assert plan.global_batch_size == before.global_batch_size == 16
    released = [warning for warning in plan.warnings if "num_microbatches" in warning or "microbatch_size" in warning]
    assert released and released[0] in caplog.text
    assert read_plan(run.plan) == before


def test_begin_obeys_a_stop_file_once_and_forgets_an_older_cancel(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run.stop.touch()
    write_json(run.cancelled, {"job_ids": ["6"]})
    begin(run, capsys)
    assert not run.stop.exists() and not run.cancelled.exists()


def test_a_job_cancelled_while_it_queued_itself_again_trains_no_more(
    run: RunDir, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Slurm takes a requeue that comes after scancel, and starts the job again."""
    write_json(run.cancelled, {"job_ids": ["7"]})
    with caplog.at_level("INFO"):
        assert main(["begin", "--run-dir", str(run.path)]) == 0
    assert capsys.readouterr().out.strip() == "" and run.attempt_list() == []
    assert "job 7 was cancelled" in caplog.text and "hpjob resume" in caplog.text
    assert run.cancelled.exists()


def test_a_job_that_is_preempted_before_its_ranks_start_tells_them(
    run: RunDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm's signal went to the steps that there were: none."""
    job(fake_slurm, "RUNNING", PreemptTime="2026-03-01T10:00:00")
    begin(run, capsys)
    assert run.stop.exists()
    job(fake_slurm, "RUNNING")
    begin(run, capsys)
    assert not run.stop.exists()


def test_saved_and_preempted_goes_on(run: RunDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    attempt = begin(run, capsys)
    preempted(attempt)
    job(fake_slurm, "RUNNING")
    assert end(run, attempt, 0, capsys) == "requeue"


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING"])
def test_a_cancelled_job_does_not_come_back(
    run: RunDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    attempt = begin(run, capsys)
    preempted(attempt)
    job(fake_slurm, state)
    assert end(run, attempt, 0, capsys) == "stop"


def test_a_run_marked_as_cancelled_stops(
    run: RunDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = begin(run, capsys)
    preempted(attempt)
    job(fake_slurm, "RUNNING")
    run.cancelled.touch()
    assert end(run, attempt, 0, capsys) == "stop"


def test_finished_is_done(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    attempt = begin(run, capsys)
    run.finished.touch()
    assert end(run, attempt, 1, capsys) == "done"


def test_ranks_that_leave_without_a_word_stop_the_job(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert end(run, begin(run, capsys), 0, capsys) == "stop"


@pytest.mark.parametrize(
    ("preempt_time", "reason", "decision"),
    [
        ("None", "signal SIGTERM", "stop"),
        ("2026-03-01T10:00:00", "signal SIGTERM", "requeue"),
        ("None", "signal SIGUSR2", "requeue"),
    ],
)
def test_a_save_that_only_a_failed_rank_caused_is_no_preemption(
    run: RunDir,
    fake_slurm: FakeSlurm,
    capsys: pytest.CaptureFixture[str],
    preempt_time: str,
    reason: str,
    decision: str,
) -> None:
    """srun ends the others of a failed rank with TERM, which they take for a preemption."""
    attempt = begin(run, capsys)
    attempt.srun_log.write_text(
        "srun: error: n2: task 6: Exited with exit code 1\nsrun: launch/slurm: _step_signal: Terminating StepId=7.0\n"
    )
    preempted(attempt, reason=reason)
    job(fake_slurm, "RUNNING", PreemptTime=preempt_time)
    assert end(run, attempt, 1, capsys) == decision


def test_killed_ranks_get_a_record_and_those_killed_after_them_do_not(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = begin(run, capsys)
    attempt.rank_log(3).write_text("step 7\n")
    attempt.srun_log.write_text(
        "srun: error: n1: task 3: Out Of Memory\nsrun: launch/slurm: _step_signal: Terminating StepId=7.0\n"
        "srun: error: n2: tasks 4-7: Killed\n"
    )
    assert end(run, attempt, 137, capsys) == "stop"
    (failure,) = read_failures(attempt)
    assert (failure.rank, failure.node, failure.kind) == (3, "n1", "killed")
    assert "Out Of Memory" in failure.message
    assert failure.time == attempt.rank_log(3).stat().st_mtime


AROUND = {
    "a rank killed": ("srun: error: n2: task 6: Killed\nsrun: Terminating StepId=7.0\n", 137, "killed from outside"),
    "a node lost": ("srun: error: Node failure on n2\n", 1, "node n2 failed"),
    "srun killed": ("", 137, "srun was ended from outside (signal 9)"),
    "srun told to end": (
        "srun: forcing job termination\nsrun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
        "srun: error: n1: task 0: Killed\n",
        137,
        "srun was told to end the ranks",
    ),
    "no launch": (
        "srun: error: Task launch for StepId=7.0 failed on node n2: Communication connection failure\n",
        1,
        "srun could not start the ranks",
    ),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_broke_around_the_ranks_lets_the_run_go_on(
    run: RunDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    log, code, words = AROUND[name]
    job(fake_slurm, "RUNNING")
    for expected in ("requeue", "requeue", "stop"):
        attempt = begin(run, capsys)
        attempt.srun_log.write_text(log)
        assert end(run, attempt, code, capsys) == expected
        document = read_json(attempt.end)
        assert document is not None and words in document["reason"]


@pytest.mark.parametrize("what", ["Out Of Memory", "Segmentation fault", "Exited with exit code 7"])
def test_what_would_happen_again_stops(
    run: RunDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    job(fake_slurm, "RUNNING")
    attempt = begin(run, capsys)
    attempt.srun_log.write_text(f"srun: error: n2: task 6: {what}\nsrun: Terminating StepId=7.0\n")
    assert end(run, attempt, 7, capsys) == "stop"


def test_ranks_that_only_lost_a_peer_go_on(
    run: RunDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node that lost power says nothing, and Slurm notices minutes later."""
    job(fake_slurm, "RUNNING")
    attempt = begin(run, capsys)
    for rank in range(4):
        write_json(attempt.failure(rank), {"rank": rank, "node": "n1", "time": 1.0, "kind": "peer-lost"})
    attempt.srun_log.write_text("srun: error: n1: tasks 0-3: Exited with exit code 1\n")
    assert end(run, attempt, 1, capsys) == "requeue"


def test_a_peer_that_slurm_killed_is_no_failure(
    run: RunDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without grace time one rank may be killed while the other still notices that."""
    job(fake_slurm, "COMPLETING", PreemptTime="2026-03-01T10:00:00")
    attempt = begin(run, capsys)
    write_json(attempt.failure(0), {"rank": 0, "node": "n1", "time": 1.0, "kind": "peer-lost"})
    attempt.srun_log.write_text(
        "srun: error: n1: task 0: Exited with exit code 1\n"
        "srun: Terminating StepId=7.0\nsrun: error: n2: task 4: Killed\n"
    )
    assert end(run, attempt, 1, capsys) == "requeue"


def test_ranks_that_slurm_killed_before_they_saved_have_not_failed(
    run: RunDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    job(fake_slurm, "COMPLETING", Restarts=1)
    attempt = begin(run, capsys)
    attempt.srun_log.write_text("srun: Job step aborted: Waiting up to 7 seconds\nsrun: error: n1: task 0: Killed\n")
    assert end(run, attempt, 137, capsys) == "queued"


def test_a_job_that_is_queued_again_already_is_not_queued_twice(
    run: RunDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    job(fake_slurm, "RUNNING", Restarts=1)
    attempt = begin(run, capsys)
    preempted(attempt)
    assert end(run, attempt, 0, capsys) == "queued"


def test_ranks_that_outlive_srun_are_told_to_save(
    run: RunDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job(fake_slurm, "RUNNING")
    attempt = begin(run, capsys)
    answers = iter([True, True, False])
    monkeypatch.setattr(rescue, "_ranks_run", lambda job_id: next(answers))
    monkeypatch.setattr(rescue, "_POLL_S", 0.0)
    assert end(run, attempt, 137, capsys) == "requeue"
    assert fake_slurm.calls("scancel") == ["--signal=USR2 7"]


def test_a_rank_that_exits_before_it_can_report_is_read_from_its_log(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = begin(run, capsys)
    attempt.rank_log(2).write_text(
        'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n'
        "ModuleNotFoundError: No module named 'torch'\nsome later line\n"
    )
    attempt.srun_log.write_text("srun: error: n1: task 2: Exited with exit code 1\n")
    assert end(run, attempt, 1, capsys) == "stop"
    failure = first_failure(read_failures(attempt))
    assert failure is not None
    assert (failure.rank, failure.exception) == (2, "ModuleNotFoundError")
    assert failure.traceback is not None and failure.traceback.endswith("No module named 'torch'")


def test_a_rank_keeps_its_own_record(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    attempt = begin(run, capsys)
    own = {"rank": 2, "node": "n1", "time": 1.0, "kind": "exception", "message": "own words"}
    write_json(attempt.failure(2), own)
    attempt.srun_log.write_text("srun: error: n1: task 2: Exited with exit code 1\n")
    end(run, attempt, 1, capsys)
    assert [failure.message for failure in read_failures(attempt)] == ["own words"]


def test_all_ranks_of_a_lost_node_are_recorded(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    attempt = begin(run, capsys)
    attempt.srun_log.write_text("srun: error: Node failure on n2\n")
    end(run, attempt, 1, capsys)
    assert {failure.rank for failure in read_failures(attempt)} == {4, 5, 6, 7}


def test_a_signal_during_setup_is_no_failure(
    run: RunDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = begin(run, capsys)
    attempt.srun_log.write_text("srun: error: n1: tasks 0-3: Terminated\n")
    job(fake_slurm, "RUNNING", PreemptTime="2026-03-01T10:00:00")
    assert end(run, attempt, 143, capsys) == "requeue"


def test_three_attempts_without_a_new_checkpoint_stop(
    run: RunDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    job(fake_slurm, "RUNNING")
    decisions = []
    for _ in range(3):
        attempt = begin(run, capsys)
        preempted(attempt, step=0)
        decisions.append(end(run, attempt, 0, capsys))
    assert decisions == ["requeue", "requeue", "stop"]
    document = read_json(attempt.end)
    assert document is not None and "without a new checkpoint" in document["reason"]


def test_progress_in_between_lets_it_go_on(
    run: RunDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    job(fake_slurm, "RUNNING")
    for step in range(1, 6):
        attempt = begin(run, capsys)
        run.checkpoint(step).mkdir(parents=True)
        write_json(run.checkpoint(step) / "manifest.json", {})
        preempted(attempt, step=step)
        assert end(run, attempt, 0, capsys) == "requeue"


def test_address_of_rank_zero() -> None:
    shared = {"n1": "127.0.0.1", "n2": "127.0.0.1"}
    assert master_address("n2", {"n1": "10.0.0.1", "n2": "10.0.0.2"}, "n1") == "10.0.0.2"
    assert master_address("n1", shared, "n1") == "127.0.0.1"
    with pytest.raises(EnvironmentProblemError, match="which other nodes cannot reach"):
        master_address("n1", {"n1": "127.0.0.1", "n2": "10.0.0.2"}, "n2")


def test_a_name_that_only_its_own_node_takes_for_loopback() -> None:
    assert master_address("localhost", {"localhost": "localhost", "n2": "10.0.0.2"}, "n2") == "localhost"


def test_lead_from_measured_times(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert measured_step_s(run) is None
    lines = [json.dumps({"step": i, "step_time_s": 2.0}) for i in range(1, 30)]
    run.metrics.write_text("\n".join(lines) + '\n{"step": 30, "st')
    assert measured_step_s(run) == 2.0
    assert signal_lead_s(2.0, 30.5) == 183
