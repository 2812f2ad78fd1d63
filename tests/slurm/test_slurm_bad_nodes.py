"""Nodes that failed: remembered, left out of the next job, taken back; never for what was not theirs."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import read_json, write_json
from hpjob.slurm.attempt_end import end_attempt
from hpjob.slurm.bad_nodes import MEMORY_S, NodeMemory, Strike
from hpjob.slurm.leave_out import leave_out_bad_nodes
from hpjob.slurm.model import JobSpec
from hpjob.slurm.node_faults import remember_lost_nodes
from hpjob.slurm.render import render_script
from hpjob.slurm.site import read_site
from tests.support.fake_slurm import FakeSlurm

SPEC = JobSpec(job_name="r", run_dir="/r", python="/p", nodes=2, ranks_per_node=4, gpus_per_node=4)
NODES = "n1 idle\nn2 idle\nn3 mixed\nn4 idle\n"
JOB = (
    "JobId=7 JobState={state} Restarts=0 PreemptTime=None Partition=batch ReqNodeList={asked} ExcNodeList={excluded}\n"
)


def strike(node: str, attempt: int = 0, **changes: Any) -> Strike:
    values = {"time": 1000.0, "kind": "hang", "run": "/runs/a", "what": "rank 3 hangs"}
    return Strike(node=node, attempt=attempt, **(values | changes))


def memory(folder: Path, now: float = 1000.0) -> NodeMemory:
    return NodeMemory("fake", folder, clock=lambda: now)


def bad(fake: FakeSlurm, *nodes: str) -> None:
    """Let nodes have failed twice, as seen from the commands."""
    remembered = NodeMemory("fake")
    for node in nodes:
        remembered.add([strike(node, attempt, time=remembered._clock()) for attempt in (0, 1)])


@pytest.fixture
def fake(fake_slurm: FakeSlurm) -> FakeSlurm:
    fake_slurm.answer("sinfo -h -N -p batch", NODES)
    job(fake_slurm)
    return fake_slurm


def job(fake: FakeSlurm, state: str = "RUNNING", asked: str = "(null)", excluded: str = "(null)") -> None:
    fake.answer("scontrol show job", JOB.format(state=state, asked=asked, excluded=excluded))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def attempt(run: RunDir, executor: str = "slurm") -> AttemptDir:
    found = run.attempt(len(run.attempt_list()))
    found.failures.mkdir(parents=True)
    found.hosts.write_text("n1\n" * 4 + "n2\n" * 4)
    document = {"job_id": "7", "executor": executor, "hostnames": ["n1", "n2"], "restart_count": 0}
    write_json(found.attempt_json, document | {"site": {"cluster": "fake"}, "checkpoint_step": found.index})
    return found


def fail(attempt: AttemptDir, rank: int, kind: str, message: str = "it failed", **fields: Any) -> None:
    record = {"rank": rank, "node": f"n{rank // 4 + 1}", "time": 1.0 + rank, "kind": kind, "message": message}
    write_json(attempt.failure(rank), record | fields)


def test_two_failures_in_a_week_make_a_node_bad(tmp_path: Path) -> None:
    seen = memory(tmp_path)
    seen.add([strike("n3")])
    seen.add([strike("n3")])  # the same attempt tells it twice
    assert seen.bad() == {}
    seen.add([strike("n3", attempt=1), strike("n4")])
    assert list(memory(tmp_path).bad()) == ["n3"]
    assert memory(tmp_path, now=1000.0 + MEMORY_S + 1).bad() == {}
    document = json.loads(seen.path.read_text())
    assert document["cluster"] == "fake" and document["strikes"][0]["what"] == "rank 3 hangs"


def test_it_counts_over_runs(tmp_path: Path) -> None:
    memory(tmp_path).add([strike("n3")])
    memory(tmp_path).add([strike("n3", run="/runs/b")])
    assert list(memory(tmp_path).bad()) == ["n3"]


def test_forgetting(tmp_path: Path) -> None:
    seen = memory(tmp_path)
    seen.add([strike("n3"), strike("n4")])
    assert seen.forget(["n3", "n9"]) == ["n3"]
    assert [entry.node for entry in seen.strikes()] == ["n4"]
    assert seen.forget() == ["n4"] and seen.strikes() == []


def test_many_at_once_lose_nothing(tmp_path: Path) -> None:
    def add(number: int) -> None:
        memory(tmp_path).add([strike(f"n{number}", attempt) for attempt in (0, 1)])

    threads = [threading.Thread(target=add, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(memory(tmp_path).bad()) == 16


@pytest.mark.parametrize("text", ["", "{", "[]", '{"strikes": [1, {"node": "n1"}]}'])
def test_a_damaged_file_is_an_empty_one(tmp_path: Path, text: str) -> None:
    seen = memory(tmp_path)
    seen.path.parent.mkdir(exist_ok=True)
    seen.path.write_text(text)
    assert seen.strikes() == []
    seen.add([strike("n3")])
    assert len(seen.strikes()) == 1


def test_a_home_that_cannot_be_written_costs_only_the_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    memory(tmp_path / "file").add([strike("n3")])
    assert "cannot be remembered" in caplog.text


def test_a_bad_node_is_left_out_of_a_job(fake: FakeSlurm) -> None:
    bad(fake, "n3", "elsewhere")
    spec, notes = leave_out_bad_nodes(SPEC, read_site())
    assert "#SBATCH --exclude=n3\n" in render_script(spec)
    assert notes == [
        "n3 is left out: it failed 2 times lately, last: rank 3 hangs; `hpjob nodes forget n3` takes it back"
    ]
    NodeMemory("fake").forget(["n3"])
    assert leave_out_bad_nodes(spec, read_site()) == (SPEC, [])


def test_a_persons_own_list_is_kept_beside_it(fake: FakeSlurm) -> None:
    bad(fake, "n3")
    own = SPEC.model_copy(update={"nodes": 1, "extra_options": ("--exclude=n1", "--comment=x")})
    spec, _ = leave_out_bad_nodes(own, read_site())
    assert spec.sbatch_options == ("--comment=x", "--exclude=n[1,3]")
    asked = SPEC.model_copy(update={"extra_options": ("--nodelist=n[2-3]",)})
    spec, notes = leave_out_bad_nodes(asked, read_site())
    assert spec == asked and "asked for by name" in notes[0]


def test_no_node_is_left_out_where_too_few_remain(fake: FakeSlurm) -> None:
    bad(fake, "n1", "n3")
    assert leave_out_bad_nodes(SPEC, read_site())[0].left_out_nodes == ("n1", "n3")
    fake.answer("sinfo -h -N -p batch", NODES.replace("n4 idle", "n4 down*"))
    spec, notes = leave_out_bad_nodes(SPEC, read_site())
    assert spec == SPEC and "too few nodes remain" in notes[0]


def test_a_hang_queues_the_job_again_without_its_node(fake: FakeSlurm, run: RunDir) -> None:
    job(fake, excluded="n4")
    fake.answer("sinfo -h -N -p batch", NODES + "n5 idle\n")
    ended = attempt(run)
    fail(ended, 1, "peer-lost")
    fail(ended, 5, "hang", "rank 5 on n2 hangs: no progress for 31 s", exception="Hang")
    assert end_attempt(run, ended, 3, []) == "requeue"
    assert ended.exclude.read_text() == "n[2,4]\n"
    document = read_json(ended.end)
    assert document is not None and document["left_out"] == ["n2"]
    assert document["reason"] == "rank 5 on n2 hangs: no progress for 31 s"
    assert [(entry.node, entry.kind) for entry in NodeMemory("fake").strikes()] == [("n2", "hang")]


def test_a_save_that_srun_asked_for_does_not_hide_the_hang(fake: FakeSlurm, run: RunDir) -> None:
    ended = attempt(run)
    fail(ended, 5, "hang", "rank 5 on n2 hangs", exception="Hang")
    ended.srun_log.write_text(
        "srun: error: n2: task 5: Exited with exit code 3\nsrun: launch/slurm: _step_signal: Terminating StepId=7.0\n"
    )
    write_json(ended.outcome, {"kind": "preempted", "step": 1, "reason": "signal SIGTERM", "time": 1.0})
    assert end_attempt(run, ended, 3, None) == "requeue"
    assert ended.exclude.exists()


def test_hangs_without_progress_end_in_a_stop(fake: FakeSlurm, run: RunDir) -> None:
    decisions = []
    for _ in range(3):
        ended = attempt(run)
        write_json(ended.attempt_json, (read_json(ended.attempt_json) or {}) | {"checkpoint_step": 0})
        fail(ended, 5, "hang", "rank 5 hangs", exception="Hang")
        decisions.append(end_attempt(run, ended, 3, []))
    assert decisions == ["requeue", "requeue", "stop"]
    report = (read_json(ended.end) or {})["report"]
    assert len(report) == 3
    assert report[0].startswith("attempt 0 on n1, n2 from checkpoint step 0: rank 5 hangs; log of rank 5: ")


@pytest.mark.parametrize(
    ("failures", "why"),
    [
        ([(1, "exception", {}), (5, "exception", {})], "a mistake in the program"),
        ([(1, "exception", {})], "one rank raised"),
        ([(1, "hang", {"exception": "Hang"}), (5, "hang", {"exception": "Hang"})], "the same on several nodes"),
        ([(0, "hang", {"exception": "Deadlock"})], "all wait for each other"),
        ([(1, "killed", {"message": "Out Of Memory; the rank left no report"})], "too much memory asked"),
        ([(1, "peer-lost", {})], "only lost a peer"),
    ],
)
def test_what_is_not_the_nodes_fault(
    fake: FakeSlurm, run: RunDir, failures: list[tuple[int, str, dict[str, Any]]], why: str
) -> None:
    ended = attempt(run)
    for rank, kind, fields in failures:
        fail(ended, rank, kind, **fields)
    end_attempt(run, ended, 3, [])
    assert NodeMemory("fake").strikes() == [] and not ended.exclude.exists(), why


def test_neither_preemption_nor_virtual_nodes_are_blamed(fake: FakeSlurm, run: RunDir) -> None:
    job(fake, state="COMPLETING")
    killed = attempt(run)
    fail(killed, 5, "killed")
    end_attempt(run, killed, 137, [])
    local = attempt(run, executor="local")
    fail(local, 5, "hang", exception="Hang")
    assert end_attempt(run, local, 3, []) == "requeue"
    assert NodeMemory("fake").strikes() == []
    job(fake)
    end_attempt(run, killed, 137, [])
    assert [entry.node for entry in NodeMemory("fake").strikes()] == ["n2"]  # the negative control


def test_a_rank_that_another_reported_was_really_killed(fake: FakeSlurm, run: RunDir) -> None:
    ended = attempt(run)
    fail(ended, 5, "hang", "shows no sign of life", reported_by=0)
    ended.srun_log.write_text("srun: error: n2: task 5: Killed\n")
    end_attempt(run, ended, 137, None)
    record = read_json(ended.failure(5))
    assert record is not None and record["kind"] == "killed"


def test_a_node_that_is_asked_for_by_name_stays(fake: FakeSlurm, run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    job(fake, asked="n[1-2]")
    ended = attempt(run)
    fail(ended, 5, "hang", exception="Hang")
    end_attempt(run, ended, 3, [])
    assert not ended.exclude.exists() and "asks for it by name" in caplog.text


def test_a_node_that_is_down_after_it_took_its_job_along(fake: FakeSlurm, run: RunDir) -> None:
    attempt(run)
    fake.answer("sinfo -h -N -n n1,n2", "n1 idle\nn2 down*\n")
    assert remember_lost_nodes(run) == ["n2"]
    assert [(entry.node, entry.kind) for entry in NodeMemory("fake").strikes()] == [("n2", "node-failure")]
    write_json(run.attempt(0).end, {"decision": "requeue"})
    assert remember_lost_nodes(run) == []


def test_a_node_failure_that_slurm_reports(fake: FakeSlurm, run: RunDir) -> None:
    ended = attempt(run)
    ended.srun_log.write_text("srun: error: Node failure on n2\n")
    end_attempt(run, ended, 1, None)
    assert [(entry.node, entry.kind) for entry in NodeMemory("fake").strikes()] == [("n2", "node-failure")]
