"""Reading a run folder, whole or damaged."""

from __future__ import annotations

import json
from pathlib import Path

from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import write_json
from hpjob.report.logs import rank_to_show, ranks_with_logs, tail
from hpjob.report.read import read_run
from tests.support.runs import make_run


def write_metrics(run: RunDir, steps: int) -> None:
    lines = [
        json.dumps({"step": i, "loss": 2.0 / i, "tokens": 10, "tokens_per_s": 20.0 * i, "step_time_s": 0.5, "time": i})
        for i in range(1, steps + 1)
    ]
    run.metrics.write_text("\n".join(lines) + "\n", encoding="utf-8")


def begin(run: RunDir, index: int) -> AttemptDir:
    attempt = run.attempt(index)
    attempt.failures.mkdir(parents=True)
    write_json(attempt.attempt_json, {"job_id": "7", "executor": "slurm", "started_at": 1.0, "hostnames": ["n1"]})
    return attempt


def test_a_whole_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=40).run
    write_metrics(run, 30)
    first, second = begin(run, 0), begin(run, 1)
    write_json(first.outcome, {"kind": "preempted", "step": 12, "reason": "signal SIGTERM"})
    write_json(first.end, {"decision": "requeue", "reason": "saved at step 12", "time": 2.0})
    second.events.write_text('{"event": "training"}\n{"event": "checkpoint-sa', encoding="utf-8")
    run.checkpoint(12).mkdir(parents=True)
    write_json(run.checkpoint(12) / "manifest.json", {})
    run.checkpoint(20).mkdir()
    record = read_run(run.path)
    assert (record.recipe, record.total_steps, record.checkpoint_step) == ("tiny", 40, 12)
    assert record.plan is not None and record.plan.degrees.tp == 2
    assert record.last_step is not None and record.last_step.step == 30
    assert (record.tokens_per_s, record.seconds_left) == (410.0, 5.0)
    assert [(attempt.decision, attempt.phase) for attempt in record.attempts] == [("requeue", None), (None, "training")]
    outcome = record.attempts[0].outcome
    assert outcome is not None and (outcome.kind, outcome.step) == ("preempted", 12)
    assert not record.finished and not record.cancelled


def test_a_damaged_run_shows_what_is_left(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run").run
    write_metrics(run, 3)
    with run.metrics.open("a", encoding="utf-8") as stream:
        stream.write('{"step": "x"}\n[]\n{"step": 4, "lo')
    run.plan.write_text('{"version": 99}', encoding="utf-8")
    run.recipe.write_text("name: [", encoding="utf-8")
    run.attempt(0).path.mkdir(parents=True)
    record = read_run(run.path)
    assert (len(record.steps), record.plan, record.recipe, record.attempts) == (3, None, "?", ())
    assert record.seconds_left is None


def test_values_of_another_type_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run").run
    first, second = begin(run, 0), begin(run, 1)
    write_json(first.attempt_json, {"index": "q", "started_at": "zz", "hostnames": 4})
    write_json(second.outcome, {"kind": "weird", "step": "x", "time": []})
    second.failures.mkdir(exist_ok=True)
    write_json(second.failures / "rank-00000.json", {"rank": "a", "time": None})
    write_json(second.failures / "rank-00001.json", {"rank": 1, "node": "n1"})
    attempts = read_run(run.path).attempts
    assert [attempt.files.path.name for attempt in attempts] == ["0001"]
    assert attempts[0].outcome is None
    assert [failure.rank for failure in attempts[0].failures] == [1]


def test_an_empty_folder(tmp_path: Path) -> None:
    record = read_run(tmp_path)
    assert (record.steps, record.attempts, record.checkpoint_step, record.last_step) == ((), (), 0, None)


def test_tail_of_long_files_and_missing_ones(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {i} {'x' * 100}\n" for i in range(5000)), encoding="utf-8")
    assert [line.split()[1] for line in tail(path, 2)] == ["4998", "4999"]
    assert len(tail(path, 10_000)) == 5000
    assert tail(path, 0) == [] and tail(tmp_path / "none", 5) == []
    path.write_bytes("no end of line ä".encode()[:-1])
    assert tail(path, 5) == ["no end of line �"]


def test_the_log_that_says_most(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run").run
    attempt = begin(run, 0)
    assert rank_to_show(read_run(run.path).attempts[0]) is None
    for rank in (0, 5, 11):
        attempt.rank_log(rank).touch()
    assert ranks_with_logs(attempt) == [0, 5, 11]
    assert rank_to_show(read_run(run.path).attempts[0]) == 0
    write_json(attempt.failure(5), {"rank": 5, "node": "n2", "time": 9.0, "kind": "killed"})
    write_json(attempt.failure(0), {"rank": 0, "node": "n1", "time": 1.0, "kind": "peer-lost"})
    assert rank_to_show(read_run(run.path).attempts[0]) == 5
