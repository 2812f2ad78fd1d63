"""The attempts of a run as one story: waiting, running, ends, lost steps, goodput."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import write_json
from hpjob.report.read import read_run
from hpjob.report.timeline import accounting, summaries
from hpjob.report.timeline_text import accounting_line, attempt_lines


def attempt(run: RunDir, started_at: float, job_id: str = "7", **end: Any) -> AttemptDir:
    found = run.attempt(len(run.attempt_list()))
    found.failures.mkdir(parents=True)
    document = {"job_id": job_id, "executor": "slurm", "started_at": started_at, "hostnames": ["n1", "n2"]}
    write_json(found.attempt_json, document)
    if end:
        write_json(found.end, {"decision": "requeue", **end})
    return found


def three_attempts(folder: Path) -> RunDir:
    """Queued 10 s, saved after 100 s; queued 20 s, hung at step 8; 30 s later the last one runs."""
    run = RunDir(folder)
    run.path.mkdir(exist_ok=True)
    run.jobs.write_text(json.dumps({"job_id": "7", "executor": "slurm", "submitted_at": 990.0}) + "\n")
    first = attempt(run, 1000.0, time=1100.0, reason="saved at step 5")
    write_json(first.outcome, {"kind": "preempted", "step": 5, "reason": "signal SIGTERM"})
    second = attempt(run, 1120.0, time=1200.0, reason="rank 3 on n2 hangs", left_out=["n2"])
    record = {"rank": 3, "node": "n2", "time": 1190.0, "kind": "hang", "message": "rank 3 on n2 hangs: no progress"}
    write_json(second.failure(3), record)
    third = attempt(run, 1230.0)
    third.events.write_text(json.dumps({"time": 1231.0, "event": "training", "first_step": 7, "steps_again": 2}) + "\n")
    done = {1: 0, 2: 0, 3: 0, 4: 0, 5: 0, 6: 1, 7: 2, 8: 2}
    lines = [
        json.dumps({"step": step, "loss": 1.0, "tokens": 8, "step_time_s": 20.0, "attempt": who, "time": 1000.0})
        for step, who in done.items()
    ]
    run.metrics.write_text("\n".join(lines) + "\n")
    return run


def test_every_attempt_says_how_long_it_waited_and_why_it_ended(tmp_path: Path) -> None:
    record = read_run(three_attempts(tmp_path / "run").path)
    found = summaries(record, live=True, now=1300.0)
    assert [one.queued_s for one in found] == [10.0, 20.0, 30.0]
    assert [one.ended_at for one in found] == [1100.0, 1200.0, None]
    assert [(one.first_step, one.last_step) for one in found] == [(1, 5), (6, 6), (7, 8)]
    assert [one.why for one in found] == [
        "saved at step 5 (signal SIGTERM)",
        "hang: rank 3 on n2 hangs: no progress",
        "runs",
    ]
    assert (found[1].left_out, found[2].steps_again) == (("n2",), 2)


def test_where_the_time_went(tmp_path: Path) -> None:
    record = read_run(three_attempts(tmp_path / "run").path)
    account = accounting(record, summaries(record, live=True, now=1300.0), now=1300.0)
    assert (account.wall_s, account.queued_s, account.held_s, account.step_s) == (310.0, 60.0, 250.0, 160.0)
    assert account.steps_lost == 2
    assert account.goodput == 160 / 250 and account.goodput_of_wall == 160 / 310
    assert accounting_line(account) == "64 % of 4 min 10 s on nodes, 1 min 0 s in the queue, 2 steps lost"


def test_the_lines_for_the_terminal(tmp_path: Path) -> None:
    record = read_run(three_attempts(tmp_path / "run").path)
    lines = attempt_lines(summaries(record, live=True, now=1300.0), 1300.0)
    assert lines[0].split("  ")[1:3] == ["0", "n[1-2]"]
    assert lines[1].endswith("steps 6-6  hang: rank 3 on n2 hangs: no progress; then without n2")
    assert lines[2].endswith("runs")


def test_an_attempt_without_a_word_ended_at_its_last_sign_of_life(tmp_path: Path) -> None:
    run = three_attempts(tmp_path / "run")
    record = read_run(run.path)
    last = summaries(record, live=False, now=9999.0)[-1]
    assert (last.ended_at, last.why) == (1231.0, "ended without a word: its nodes or its job were gone")
    attempt(run, 1235.0, job_id="8")
    found = summaries(read_run(run.path), live=False, now=9999.0)
    assert found[2].ended_at == 1231.0 and found[3].queued_s == 4.0


def test_a_run_that_never_started(tmp_path: Path) -> None:
    record = read_run(tmp_path)
    account = accounting(record, summaries(record, live=False, now=1.0), now=1.0)
    assert (account.wall_s, account.goodput, account.goodput_of_wall) == (0.0, None, None)
    assert attempt_lines([], 1.0) == []
