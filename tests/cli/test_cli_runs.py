"""`hpjob status`, `logs`, `cancel` and `resume` on run folders and a fake Slurm."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import read_json_lines, write_json
from tests.cli.conftest import Cli
from tests.support.fake_slurm import FakeSlurm

TINY = ("submit", "--nodes", "2", "--recipe", "tiny", "--set", "data.path=corpus")
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 1\nValueError: the loss is not finite\n'


@pytest.fixture
def run(cli: Cli, fake_slurm: FakeSlurm) -> RunDir:
    """A run that was submitted as job 4711."""
    assert cli(*TINY).code == 0
    return RunDir(Path("runs/tiny-001").absolute())


def begin(run: RunDir, **changes: Any) -> AttemptDir:
    attempt = run.attempt(len(run.attempt_list()))
    attempt.failures.mkdir(parents=True)
    document = {"version": 1, "job_id": "4711", "executor": "slurm", "started_at": time.time(), "restart_count": 0}
    write_json(attempt.attempt_json, document | {"hostnames": ["n1", "n2"], "world_size": 8} | changes)
    for rank in range(8):
        attempt.rank_log(rank).write_text("".join(f"rank {rank} line {i}\n" for i in range(100)), encoding="utf-8")
    return attempt


def train(run: RunDir, steps: int) -> None:
    line = {"grad_norm": 1.0, "lr": 1e-3, "tokens": 2048, "tokens_per_s": 4096.0, "step_time_s": 0.5, "attempt": 0}
    with run.metrics.open("w", encoding="utf-8") as stream:
        for step in range(1, steps + 1):
            stream.write(json.dumps({"step": step, "loss": 7 - step / 100, "time": time.time()} | line) + "\n")


def fail(attempt: AttemptDir, rank: int, kind: str, when: float, message: str, traceback: str | None = None) -> None:
    record = {"rank": rank, "node": f"n{rank // 4 + 1}", "time": when, "kind": kind, "message": message, "step": 3}
    write_json(attempt.failure(rank), record | {"exception": "ValueError", "traceback": traceback})


def failed_run(run: RunDir, fake_slurm: FakeSlurm) -> AttemptDir:
    """Rank 5 raised; rank 1 noticed the loss of it, with a clock that is ahead."""
    attempt = begin(run)
    fail(attempt, 1, "peer-lost", 10.0, "Connection closed by peer")
    fail(attempt, 5, "exception", 20.0, "the loss is not finite", TRACEBACK)
    write_json(attempt.end, {"version": 1, "decision": "stop", "reason": "the ranks failed", "time": 21.0})
    fake_slurm.answer("squeue", "FAILED|NonZeroExitCode|n[1-2]|N/A|\n")
    return attempt


def test_a_waiting_run_says_why_and_until_when(cli: Cli, run: RunDir) -> None:
    result = cli("status")
    assert result.code == 0
    assert "tiny-001: waiting, waiting in the queue: its nodes are in use by other jobs" in result.out
    assert "expected to start at 2026-03-01T12:00:00" in result.out


def test_a_running_run_shows_progress(cli: Cli, run: RunDir, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", "RUNNING|None|n[1-2]|2026-03-01T12:00:00|59:00\n")
    begin(run)
    train(run, 20)
    shown = cli("status", "tiny-001").out
    assert "running on n1, n2" in shown and "20 of 120, loss 6.8000, 4,096 tokens/s, 50 s left" in shown
    document = json.loads(cli("status", "4711", "--json").out)
    assert (document["version"], document["state"], document["step"], document["seconds_left"]) == (
        1,
        "running",
        20,
        50,
    )


def test_a_failed_run_names_the_first_failing_rank_last(cli: Cli, run: RunDir, fake_slurm: FakeSlurm) -> None:
    attempt = failed_run(run, fake_slurm)
    shown = cli("status").out
    assert "rank 5 on n2 failed first: ValueError: the loss is not finite" in shown.splitlines()[0]
    assert shown.index("Traceback") > shown.index("folder")
    assert f"full log: {attempt.rank_log(5)}" in shown and "next: hpjob resume tiny-001" in shown
    document = json.loads(cli("status", "--json").out)
    assert (document["state"], document["first_failure"]["rank"]) == ("stopped", 5)


def test_a_preempted_run_where_slurm_forgot_the_job(cli: Cli, run: RunDir, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", stderr="Invalid job id specified", code=1)
    fake_slurm.answer("sacct", stderr="accounting storage is disabled", code=1)
    assert "lost" in cli("status").out
    attempt = begin(run)
    write_json(attempt.outcome, {"kind": "preempted", "step": 13, "reason": "signal SIGTERM"})
    assert "stopped, saved at step 13 (signal SIGTERM)" in cli("status").out


def test_a_finished_run(cli: Cli, run: RunDir) -> None:
    run.finished.touch()
    assert "tiny-001: finished, the last step is done" in cli("status").out
    result = cli("resume")
    assert (result.code, result.out) == (0, "tiny-001 is finished, there is nothing to resume\n")


def test_logs_name_the_first_failing_rank_first_and_end_with_its_traceback(
    cli: Cli, run: RunDir, fake_slurm: FakeSlurm
) -> None:
    failed_run(run, fake_slurm)
    lines = cli("logs", "--lines", "3").out.splitlines()
    assert lines[0] == "rank 5 on n2 failed first: ValueError: the loss is not finite"
    assert "rank 5 line 99" in lines and "rank 5 line 96" not in lines
    assert lines[-1] == "ValueError: the loss is not finite"
    document = json.loads(cli("logs", "--json", "--lines", "2").out)
    assert (document["rank"], document["first_failure"]["rank"]) == (5, 5)
    assert document["lines"] == ["rank 5 line 98", "rank 5 line 99"]


def test_logs_of_one_rank_and_attempt(cli: Cli, run: RunDir) -> None:
    begin(run)
    begin(run)
    assert "rank 3 line 99" in cli("logs", "--rank", "3").out
    assert "attempts/0000/rank-00000.log" in cli("logs", "--attempt", "0").out
    for wrong in (("--rank", "99"), ("--attempt", "7")):
        result = cli("logs", *wrong)
        assert result.code == 2 and "hint: " in result.err


def test_logs_join_attempts(cli: Cli, run: RunDir) -> None:
    first = begin(run)
    write_json(first.outcome, {"kind": "preempted", "step": 13, "reason": "signal SIGTERM"})
    second = begin(run)
    second.rank_log(0).write_text("restored\nstep 14\n", encoding="utf-8")
    shown = cli("logs", "--lines", "4").out.splitlines()
    assert shown[1:3] == ["rank 0 line 98", "rank 0 line 99"]
    assert shown[3] == "-- attempt 0 ended: saved at step 13 (signal SIGTERM)"
    assert shown[-2:] == ["restored", "step 14"]
    assert "rank 0 line 99" not in cli("logs", "--attempt", "1").out
    document = json.loads(cli("logs", "--json", "--lines", "1").out)
    assert document["lines"] == ["step 14"]
    assert [(part["attempt"], part["lines"]) for part in document["earlier"]] == [(0, ["rank 0 line 99"])]


def test_status_tells_the_story_of_all_attempts(
    cli: Cli, run: RunDir, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    fake_slurm.answer("squeue", "RUNNING|None|n[1-2]|2026-03-01T12:00:00|59:00\n")
    first = begin(run, started_at=time.time() - 100)
    write_json(first.outcome, {"kind": "preempted", "step": 13, "reason": "signal SIGTERM"})
    write_json(first.end, {"decision": "requeue", "reason": "saved", "time": time.time() - 50})
    begin(run, started_at=time.time() - 20)
    train(run, 20)
    shown = cli("status").out
    assert "goodput     14 % of 1 min 10 s on nodes" in shown and "0 steps lost" in shown
    assert "saved at step 13 (signal SIGTERM)" in shown
    document = json.loads(cli("status", "--json").out)
    assert [attempt["why"] for attempt in document["attempt_list"]] == ["saved at step 13 (signal SIGTERM)", "runs"]
    assert document["steps_lost"] == 0 and 0.1 < document["goodput"] < 0.2
    assert document["seconds"]["steps"] == 10.0


def test_logs_before_the_job_started(cli: Cli, run: RunDir) -> None:
    result = cli("logs")
    assert result.code == 0 and "has no logs yet" in result.err
    document = json.loads(cli("logs", "--json").out)
    assert (document["attempt"], document["lines"], document["first_failure"]) == (None, [], None)
    run.slurm_log("4711").write_text("module: command not found\n", encoding="utf-8")
    assert "module: command not found" in cli("logs").out


@pytest.mark.parametrize("text", ["nope", "9999"])
def test_an_unknown_run(cli: Cli, run: RunDir, text: str) -> None:
    result = cli("status", text)
    assert result.code == 2 and "tiny-001" in result.err


def test_no_runs_at_all(cli: Cli) -> None:
    result = cli("status")
    assert result.code == 2 and "no runs in runs" in result.err and "hpjob submit" in result.err


def test_the_newest_run_is_meant_when_none_is_named(cli: Cli, run: RunDir) -> None:
    assert cli(*TINY, "--name", "newer").code == 0
    assert cli("status").out.startswith("newer:")


def test_cancel_marks_then_cancels_and_waits(cli: Cli, run: RunDir, fake_slurm: FakeSlurm) -> None:
    program = fake_slurm.path / "bin" / "scancel"
    program.unlink()
    # The mark must be there before Slurm is told; afterwards the job is gone.
    program.write_text(
        f"#!/bin/bash\n[[ -e {run.cancelled} ]] || exit 1\n"
        f"printf 'CANCELLED|None|n1|N/A|\\n' >{fake_slurm.path}/answers/squeue/stdout\n"
        f"echo $* >{run.path}/scancelled\n",
        encoding="utf-8",
    )
    program.chmod(0o755)
    assert "would cancel job 4711" in cli("cancel", "--dry-run").out
    assert not run.cancelled.exists()
    result = cli("cancel")
    assert result.code == 0 and "cancelled tiny-001; nothing of it runs" in result.out
    assert (run.path / "scancelled").read_text(encoding="utf-8") == "4711\n"
    assert "has no job that waits or runs" in cli("cancel").out


def test_cancel_that_slurm_does_not_allow(cli: Cli, run: RunDir, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scancel", stderr="Access/permission denied", code=1)
    result = cli("cancel", "--yes")
    assert result.code == 5 and "permission denied" in result.err


def test_resume_of_a_live_run_is_refused(cli: Cli, run: RunDir) -> None:
    result = cli("resume")
    assert result.code == 2 and "has job 4711" in result.err and "hpjob cancel" in result.err


def test_resume_submits_again_in_the_same_folder(cli: Cli, run: RunDir, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", "CANCELLED|None|n1|N/A|\n")
    fake_slurm.answer("sbatch", "Submitted batch job 4712\n")
    write_json(run.cancelled, {"job_ids": ["4711"]})
    result = cli("resume")
    assert result.code == 0 and "resumed tiny-001 from step 0 as Slurm job 4712" in result.out
    assert not run.cancelled.exists()
    assert [line["job_id"] for line in read_json_lines(run.jobs)] == ["4711", "4712"]
    assert fake_slurm.submitted == run.script.read_text(encoding="utf-8")


def test_a_dry_resume_in_json_is_one_document(cli: Cli, run: RunDir, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", "CANCELLED|None|n1|N/A|\n")
    document = json.loads(cli("resume", "--dry-run", "--json").out)
    assert document["script"] == cli("resume", "--dry-run").out == run.script.read_text(encoding="utf-8")
    assert len(read_json_lines(run.jobs)) == 1


def test_a_renamed_run_goes_on_in_its_new_folder(cli: Cli, run: RunDir, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", "CANCELLED|None|n1|N/A|\n")
    renamed = run.path.rename(run.path.with_name("renamed"))
    script = cli("resume", "renamed", "--dry-run").out
    assert f"\nrun_dir={renamed}\n" in script and "#SBATCH --job-name=renamed\n" in script
    assert str(run.path) not in script


def test_segments_are_left_out_where_sbatch_has_none(cli: Cli, run: RunDir, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", "CANCELLED|None|n1|N/A|\n")
    spec = json.loads(run.spec.read_text(encoding="utf-8"))
    run.spec.write_text(json.dumps(spec | {"segment": 2}), encoding="utf-8")
    assert "--segment" not in cli("resume", "--dry-run").out
    fake_slurm.answer("sbatch --segment=2 --version", "slurm-wlm 24.11.5\n")
    assert "\n#SBATCH --segment=2\n" in cli("resume", "--dry-run").out


def test_a_failed_save_is_shown_until_a_later_one_comes_through(cli: Cli, run: RunDir, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", "RUNNING|None|n1|N/A|1:00\n")
    attempt = begin(run)
    failed = {"event": "checkpoint-failed", "step": 20, "reason": "rank 1: OSError: No space left on device"}
    attempt.events.write_text(json.dumps(failed) + "\n", encoding="utf-8")
    words = "the save of step 20 failed: rank 1: OSError: No space left on device"
    assert f"  checkpoint  none yet; {words}\n" in cli("status").out
    assert json.loads(cli("status", "--json").out)["save_problem"] == words
    assert cli("logs").out.endswith(f"\n{words}\n")
    with attempt.events.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"event": "checkpoint-saved", "step": 40}) + "\n")
    assert "the save of" not in cli("status").out + cli("logs").out


def test_resume_takes_the_lead_from_measured_times(cli: Cli, run: RunDir, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", "CANCELLED|None|n1|N/A|\n")
    attempt = begin(run)
    train(run, 20)
    attempt.events.write_text(json.dumps({"event": "checkpoint-saved", "duration_s": 40.0}) + "\n", encoding="utf-8")
    assert cli("resume").code == 0
    assert "#SBATCH --signal=USR2@201\n" in fake_slurm.submitted


def test_resume_on_another_number_of_nodes_says_what_differs(cli: Cli, run: RunDir, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", "CANCELLED|None|n1|N/A|\n")
    free = ("--set", "parallel.num_microbatches=auto", "--set", "parallel.microbatch_size=auto")
    assert cli(*TINY, "--name", "free", *free).code == 0
    result = cli("resume", "free", "--nodes", "1")
    assert result.code == 0, result.err
    assert "2 nodes before, 1 now" in result.err
    assert "#SBATCH --nodes=1\n" in fake_slurm.submitted
    assert json.loads((run.path.parent / "free" / "plan.json").read_text(encoding="utf-8"))["num_nodes"] == 1
    fixed = cli("resume", run.name, "--nodes", "1")
    assert fixed.code == 0 and "num_microbatches" in fixed.err
    plan = json.loads(run.plan.read_text(encoding="utf-8"))
    assert (plan["num_nodes"], plan["global_batch_size"]) == (1, 16)
    recipe = run.recipe.read_text(encoding="utf-8")
    assert "num_microbatches: 2" in recipe and "microbatch_size: 4" in recipe


def test_a_damaged_record_of_the_attempt_is_said(cli: Cli, run: RunDir, fake_slurm: FakeSlurm) -> None:
    attempt = begin(run)
    attempt.attempt_json.write_text('{"version": 1, "job_', encoding="utf-8")
    fake_slurm.answer("squeue", "FAILED|NonZeroExitCode|n[1-2]|N/A|\n")
    shown = cli("status").out
    assert "attempts/0000/attempt.json is damaged" in shown
    assert "before the ranks started" not in shown
    attempt.attempt_json.unlink()
    assert "its job ended before the ranks started" in cli("status").out


@pytest.mark.parametrize("answer", ["FAILED|NonZeroExitCode|n[1-2]|N/A|\n", None])
def test_an_older_attempt_is_not_taken_for_a_damaged_one(
    cli: Cli, run: RunDir, fake_slurm: FakeSlurm, answer: str | None
) -> None:
    older = begin(run)
    fail(older, 3, "killed", 10.0, "Killed")
    write_json(older.end, {"version": 1, "decision": "requeue", "reason": "killed", "time": time.time()})
    begin(run).attempt_json.write_text('{"version": 1, "job_', encoding="utf-8")
    if answer is None:  # the controller forgets jobs after some minutes
        fake_slurm.answer("squeue", stderr="slurm_load_jobs error: Invalid job id specified\n", code=1)
        fake_slurm.answer("sacct", "")
    else:
        fake_slurm.answer("squeue", answer)
    shown = cli("status").out
    first = shown.splitlines()[0]
    assert "attempts/0001/attempt.json is damaged" in first and "rank 3" not in first
    assert "failed first" not in shown and "nor counted above" in shown
    assert json.loads(cli("status", "--json").out)["damaged_attempts"] == [1]


def test_a_damaged_attempt_in_between_is_said(cli: Cli, run: RunDir) -> None:
    begin(run).attempt_json.write_text("garbage", encoding="utf-8")
    begin(run)
    shown = cli("status").out
    assert "attempts/0000/attempt.json is damaged" in shown
    assert "damaged" not in shown.splitlines()[0]


def test_cancel_of_a_run_on_another_machine_claims_nothing(cli: Cli, run: RunDir) -> None:
    line = {"job_id": "17", "executor": "local", "submitted_at": time.time(), "host": "elsewhere"}
    run.jobs.write_text(json.dumps(line) + "\n", encoding="utf-8")
    result = cli("cancel", "--yes")
    assert result.code == 3 and "without Slurm on elsewhere" in result.err
    assert "nothing of it runs" not in result.out and not run.cancelled.exists()
