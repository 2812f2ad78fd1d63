"""Successors: who waits for whom, who goes on, and that no two jobs train one run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpjob.cli.run_status import run_status
from hpjob.core.errors import UserInputError
from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import read_json, write_json
from hpjob.slurm import attempt_begin, live
from hpjob.slurm.attempt import main
from hpjob.slurm.cancel import cancel
from hpjob.slurm.live import Submission, live_submissions, read_submissions, record_submission
from hpjob.topology.slurm import cluster_topology
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import make_run


@pytest.fixture
def run(tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A chained run of two nodes, inside job 7 that got n1 and n2; job 8 waits for its end."""
    topology = cluster_topology("batch", 2)
    prepared = make_run(tmp_path / "run", topology=topology, executor="slurm", spec_changes={"chain": True})
    for name, value in (("SLURM_JOB_ID", "7"), ("SLURM_JOB_NODELIST", "n[1-2]"), ("SLURM_JOB_PARTITION", "batch")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HPJOB_DETECT_TIMEOUT_S", "0")
    record_submission(prepared.run, Submission(job_id="7", executor="slurm", submitted_at=1.0))
    record_submission(prepared.run, Submission(job_id="8", executor="slurm", submitted_at=2.0, after="7"))
    state(fake_slurm, "7", "RUNNING")
    state(fake_slurm, "8", "PENDING", "Dependency")
    return prepared.run


def state(fake: FakeSlurm, job_id: str, word: str, reason: str = "None") -> None:
    fake.answer(f"squeue -h -t all -j {job_id}", f"{word}|{reason}|n[1-2]|N/A|1:00\n")


def shown(fake: FakeSlurm, job_id: str, word: str, **fields: object) -> None:
    values = {"JobState": word, "Restarts": 0, "PreemptTime": "None", "ExitCode": "0:0"} | fields
    fake.answer(f"scontrol show job -o {job_id}", " ".join(f"{name}={value}" for name, value in values.items()) + "\n")


def begin(run: RunDir, capsys: pytest.CaptureFixture[str], code: int = 0) -> AttemptDir | None:
    assert main(["begin", "--run-dir", str(run.path)]) == code
    printed = capsys.readouterr().out.strip()
    return AttemptDir(Path(printed)) if printed else None


def end(run: RunDir, attempt: AttemptDir, code: int, capsys: pytest.CaptureFixture[str]) -> str:
    arguments = ["end", "--run-dir", str(run.path), "--attempt-dir", str(attempt.path), "--exit-code", str(code)]
    assert main(arguments) == 0
    return capsys.readouterr().out.strip()


def saved(attempt: AttemptDir) -> None:
    write_json(attempt.outcome, {"kind": "preempted", "step": 5, "reason": "signal SIGTERM", "time": time.time()})


def as_job(monkeypatch: pytest.MonkeyPatch, job_id: str) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", job_id)


def test_a_job_leaves_the_run_to_the_successor_that_waits(
    run: RunDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = begin(run, capsys)
    assert attempt is not None and not fake_slurm.calls("sbatch")
    saved(attempt)
    shown(fake_slurm, "7", "RUNNING", PreemptTime="2026-03-01T10:00:00")
    assert end(run, attempt, 0, capsys) == "chain"


def test_a_successor_queues_the_next_one(
    run: RunDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert begin(run, capsys) is not None
    state(fake_slurm, "7", "PREEMPTED")
    state(fake_slurm, "8", "RUNNING")
    as_job(monkeypatch, "8")
    assert begin(run, capsys) is not None
    assert "--dependency=afterany:8" in fake_slurm.calls("sbatch")[-1]
    assert read_submissions(run)[-1] == Submission(
        job_id="4711", executor="slurm", submitted_at=read_submissions(run)[-1].submitted_at, after="8"
    )


def test_where_no_successor_can_be_queued_the_job_queues_itself(
    run: RunDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    state(fake_slurm, "8", "CANCELLED")
    fake_slurm.answer("sbatch", stderr="sbatch: error: Job violates accounting/QOS policy", code=1)
    attempt = begin(run, capsys)
    assert attempt is not None
    saved(attempt)
    shown(fake_slurm, "7", "RUNNING")
    assert end(run, attempt, 0, capsys) == "requeue"


@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_the_successor_of_a_stopped_job_does_nothing(
    run: RunDir,
    fake_slurm: FakeSlurm,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    attempt = begin(run, capsys)
    assert attempt is not None
    state(fake_slurm, "7", "CANCELLED" if how == "cancelled" else "FAILED")
    if how == "failed":
        shown(fake_slurm, "7", "RUNNING")
        assert end(run, attempt, 1, capsys) == "stop"
        assert fake_slurm.calls("scancel") == ["8"]
    as_job(monkeypatch, "8")
    assert begin(run, capsys) is None
    assert len(run.attempt_list()) == 1


def test_the_successor_of_a_job_whose_shell_was_killed_goes_on(
    run: RunDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(run, capsys)
    state(fake_slurm, "7", "FAILED")
    as_job(monkeypatch, "8")
    assert begin(run, capsys) is not None


def test_status_shows_the_job_whose_turn_it_is(
    run: RunDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(run, capsys)
    now = run_status(run)
    assert now.submission is not None and (now.submission.job_id, now.state) == ("7", "running")
    assert now.successors == ("8",)
    state(fake_slurm, "7", "PREEMPTED")
    state(fake_slurm, "8", "PENDING", "Resources")
    later = run_status(run)
    assert later.submission is not None and (later.submission.job_id, later.state) == ("8", "waiting")


def test_cancel_ends_successors_first(run: RunDir, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpjob.slurm.cancel.wait_until_gone", lambda job_id, timeout_s: True)
    cancel(run, [submission for submission, _ in live_submissions(run)])
    assert fake_slurm.calls("scancel") == ["8", "7"]
    assert read_json(run.cancelled) is not None


def test_cancel_tells_a_job_again_that_comes_back(
    run: RunDir, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its script had just asked Slurm to queue it again; that is carried out after scancel."""
    told: list[str] = []

    def gone(job_id: str, timeout_s: float) -> bool:
        told[:] = fake_slurm.calls("scancel")
        state(fake_slurm, "7", "PENDING" if told.count("7") < 2 else "CANCELLED")
        return job_id == "8" or told.count("7") == 2

    monkeypatch.setattr("hpjob.slurm.cancel.wait_until_gone", gone)
    cancel(run, [submission for submission, _ in live_submissions(run)])
    assert told == ["8", "7", "7"]


def test_of_two_jobs_that_begin_at_once_one_enters(
    run: RunDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both found the run free; the folder of the next attempt appears for one of them only."""
    original = attempt_begin.write_json

    def other_is_faster(path: Path, document: dict[str, object]) -> None:
        original(path, document)
        if path.name == "attempt.json" and not run.attempt_list():
            folder = run.attempt(0)
            folder.path.mkdir()
            original(folder.attempt_json, {"job_id": "9", "executor": "slurm", "started_at": 1.0})

    state(fake_slurm, "9", "RUNNING")
    monkeypatch.setattr(attempt_begin, "write_json", other_is_faster)
    assert begin(run, capsys, code=2) is None
    assert [path.name for path in run.attempts.iterdir()] == ["0000"]


def test_a_silent_slurm_lets_nobody_in(
    run: RunDir, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(run, capsys)
    monkeypatch.setattr(live, "SILENCE_S", 0.0)
    fake_slurm.answer("squeue -h -t all -j 7", stderr="Unable to contact slurm controller", code=1)
    with pytest.raises(UserInputError, match="whether job 7 still runs"):
        live.refuse_second_job(run, job_id="8")
    attempt = run.attempt(0)
    write_json(attempt.end, {"decision": "chain"})
    live.refuse_second_job(run, job_id="8")


def test_jobs_of_a_damaged_list_are_found_again(run: RunDir) -> None:
    run.submitit.mkdir()
    (run.submitit / "7_submission.sh").touch()
    run.jobs.write_bytes(b"\x00\x00\x00{")
    assert [submission.job_id for submission in read_submissions(run)] == ["7"]
    (run.submitit / "7_submission.sh").unlink()
    assert "damaged" in run_status(run).why
