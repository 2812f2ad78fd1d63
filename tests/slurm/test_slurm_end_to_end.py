"""Runs on a real slurmctld and slurmd, with a stand-in for the runtime."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpjob.cli.run_status import run_status
from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import first_failure, newest_checkpoint_step, read_failures, read_json
from hpjob.slurm.bad_nodes import NodeMemory
from hpjob.slurm.cancel import cancel
from hpjob.slurm.live import current_submission, live_submissions, read_submissions
from hpjob.slurm.query import job_state
from hpjob.slurm.site import read_site
from hpjob.slurm.submit import submit
from hpjob.topology.slurm import cluster_topology
from tests.support.runs import make_run, trained_in
from tests.support.slurm_sandbox import SlurmSandbox, processes_of, wait_for, wait_until_nothing_runs

pytestmark = pytest.mark.slurm
LONG = 100_000
Start = Callable[..., RunDir]


@pytest.fixture
def slurm(slurm_sandbox: SlurmSandbox, monkeypatch: pytest.MonkeyPatch) -> SlurmSandbox:
    """The sandbox, also for Slurm commands that this process calls."""
    slurm_sandbox.use(monkeypatch)
    return slurm_sandbox


@pytest.fixture
def start(slurm: SlurmSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Submits runs on two nodes; whatever of them is left afterwards is cancelled."""
    runs: list[RunDir] = []
    # These tests are about the launch; a busy machine takes long to ask four nodes what is in them.
    monkeypatch.setenv("HPJOB_DETECT_TIMEOUT_S", "0")

    def submit_run(folder: Path = tmp_path / "run", **behaviour: object) -> RunDir:
        prepared = make_run(folder, topology=cluster_topology("batch", 2), executor="slurm", **behaviour)  # type: ignore[arg-type]
        submit(prepared.run, "slurm", prepared.spec, prepared.script)
        runs.append(prepared.run)
        return prepared.run

    yield submit_run
    for run in runs:
        cancel(run, [submission for submission, _ in live_submissions(run)])


def job_id(run: RunDir) -> str:
    """The run's job, not one that only waits for its end."""
    current = current_submission(run)
    assert current is not None
    return current[0].job_id


def wait_until_ended(run: RunDir) -> None:
    wait_for(lambda: not job_state(job_id(run)).is_live, "the job has ended")


def wait_until_training(run: RunDir, attempt: int = 0) -> None:
    """Wait for all ranks, each of which takes signals then, and for the first step."""
    logs = [run.attempt(attempt).rank_log(rank) for rank in range(8)]
    wait_for(lambda: all(log.exists() and "of 8 on" in log.read_text() for log in logs), f"attempt {attempt} started")
    wait_for(lambda: trained_in(run, attempt), f"attempt {attempt} trains")


def preempt(slurm: SlurmSandbox) -> str:
    """Take all nodes for a moment with a job of higher priority."""
    return slurm.submit("--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")


def decision(attempt: AttemptDir) -> object:
    return (read_json(attempt.end) or {}).get("decision")


@pytest.mark.slurm_releases
def test_ranks_run_where_the_host_file_puts_them(start: Start) -> None:
    run = start()
    wait_until_ended(run)
    assert run.finished.exists()
    (attempt,) = run.attempt_list()
    hosts = attempt.hosts.read_text().split()
    assert len(hosts) == 8 and len(set(hosts)) == 2
    for rank, host in enumerate(hosts):
        assert f"rank {rank} of 8 on {host}" in attempt.rank_log(rank).read_text()
    assert job_state(job_id(run)).state == "COMPLETED"
    document = read_json(attempt.attempt_json)
    assert document is not None and document["site"]["slurm_version"] == read_site().version


@pytest.mark.slurm_releases
def test_preempted_twice_it_goes_on_by_itself(start: Start, slurm: SlurmSandbox) -> None:
    run = start(steps=30, held=2)
    for attempt in (0, 1):
        wait_until_training(run, attempt)
        preempt(slurm)
        wait_for(lambda attempt=attempt: run.attempt(attempt).end.exists(), "it saved")
    wait_until_ended(run)
    assert run.finished.exists()
    assert [decision(attempt) for attempt in run.attempt_list()] == ["requeue", "requeue", "done"]
    steps = [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]
    assert steps == list(range(1, 31))
    counts = [(read_json(attempt.attempt_json) or {})["restart_count"] for attempt in run.attempt_list()]
    assert counts == [0, 1, 2]


def test_sbatch_by_hand_resumes_and_then_finds_nothing_to_do(start: Start, slurm: SlurmSandbox) -> None:
    run = start(steps=30, held=1)
    wait_until_training(run)
    cancel(run, [submission for submission, _ in live_submissions(run)])
    assert run.cancelled.exists() and newest_checkpoint_step(run) > 0
    by_hand = slurm.submit(run.script)
    wait_for(lambda: not job_state(by_hand).is_live, "the second job has ended")
    assert run.finished.exists() and not run.cancelled.exists()
    assert job_id(run) == by_hand
    again = slurm.submit(run.script)
    wait_for(lambda: not job_state(again).is_live, "the third job has ended")
    assert job_state(again).state == "COMPLETED"
    assert len(run.attempt_list()) == 2


def test_a_second_job_does_not_enter_a_running_run(start: Start, slurm: SlurmSandbox) -> None:
    run = start(steps=LONG)
    wait_until_training(run)
    second = slurm.submit(run.script)
    wait_for(lambda: not job_state(second).is_live, "the second job has ended")
    assert job_state(second).state == "FAILED"
    assert "already running in job" in run.slurm_log(second).read_text()
    assert len(run.attempt_list()) == 1


def test_after_a_hang_it_goes_on_without_the_node(start: Start, slurm: SlurmSandbox) -> None:
    run = start(steps=30, held=1, hang_rank=5)
    wait_for(run.finished.exists, "the run is finished")
    first, second = run.attempt_list()
    bad = first.hosts.read_text().split()[5]
    assert decision(first) == "requeue" and (read_json(first.end) or {})["left_out"] == [bad]
    assert bad not in second.hosts.read_text().split()
    (strike,) = NodeMemory(read_site().cluster).strikes()
    assert (strike.node, strike.kind, strike.run) == (bad, "hang", str(run.path))


def test_cancel_ends_everything_and_nothing_comes_back(start: Start, slurm: SlurmSandbox) -> None:
    run = start(steps=LONG)
    wait_until_training(run)
    cancel(run, [submission for submission, _ in live_submissions(run)])
    assert job_state(job_id(run)).state == "CANCELLED"
    wait_until_nothing_runs(run.path)
    assert run_status(run).state == "stopped"


@pytest.mark.slurm_releases
def test_scancel_by_hand_is_obeyed(start: Start, slurm: SlurmSandbox) -> None:
    """The ranks save when Slurm ends the job, and saved ranks ask for a requeue: not for a cancelled job."""
    run = start(steps=LONG)
    wait_until_training(run)
    slurm.run("scancel", job_id(run))
    wait_until_ended(run)
    assert job_state(job_id(run)).state == "CANCELLED"
    assert decision(run.attempt(0)) in {"stop", None}
    wait_until_nothing_runs(run.path)


@pytest.mark.slurm_releases
def test_a_failing_rank_ends_the_job_and_is_named(start: Start) -> None:
    run = start(steps=LONG, raise_rank=6)
    wait_until_ended(run)
    status = run_status(run)
    (attempt,) = run.attempt_list()
    failure = first_failure(read_failures(attempt))
    assert failure is not None
    host = attempt.hosts.read_text().split()[6]
    assert (failure.rank, failure.node, failure.kind) == (6, host, "exception")
    assert "the loss is not finite" in failure.message
    assert status.state == "stopped" and f"rank 6 on {host} failed first" in status.why
    assert decision(attempt) == "stop"
    wait_until_nothing_runs(run.path)


def test_a_killed_rank_is_named_and_the_run_goes_on(start: Start) -> None:
    run = start(steps=20, held=1, kill_rank=6, only_attempt=0)
    wait_until_ended(run)
    first, second = run.attempt_list()
    failure = first_failure(read_failures(first))
    assert failure is not None and (failure.rank, failure.kind) == (6, "killed") and "Killed" in failure.message
    assert (decision(first), decision(second)) == ("requeue", "done")


def test_a_job_whose_shell_is_killed_goes_on(start: Start, slurm: SlurmSandbox) -> None:
    run = start(steps=30, held=1)
    wait_until_training(run)
    guard = run.attempt(0).path / "guard.log"
    wait_for(guard.exists, "the guard is there")
    (shell,) = [
        pid for pid, words in processes_of(slurm.path).items() if f"job{int(job_id(run)):05d}/slurm_script" in words
    ]
    os.kill(shell, signal.SIGKILL)
    wait_for(lambda: len(run.attempt_list()) == 2, "the second attempt has begun")
    wait_until_ended(run)
    assert run.finished.exists()
    end = read_json(run.attempt(0).end)
    assert end is not None and "shell was killed" in end["reason"]


def test_where_slurm_cancels_the_successor_goes_on(start: Start, slurm: SlurmSandbox) -> None:
    slurm.run(
        *("scontrol", "create", "PartitionName=spot", "Nodes=ALL", "PriorityTier=1", "PreemptMode=CANCEL"),
        *("GraceTime=0", "DefaultTime=60", "MaxTime=120"),
    )
    try:
        run = start(steps=30, held=1, spec_changes={"chain": True, "partition": "spot"})
        wait_until_training(run)
        first = job_id(run)
        wait_for(lambda: read_submissions(run)[-1].after, "a successor waits")
        preempt(slurm)
        wait_for(lambda: len(run.attempt_list()) == 2, "the successor has begun")
        wait_for(lambda: not live_submissions(run), "no job of the run is left")
    finally:
        slurm.run("scontrol", "delete", "PartitionName=spot", check=False)
    assert run.finished.exists()
    assert job_state(first).state == "PREEMPTED"
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == list(range(1, 31))
    wait_until_nothing_runs(run.path)


def test_slurms_own_warning_saves_before_the_time_limit(start: Start, slurm: SlurmSandbox) -> None:
    """The limit is lowered once the ranks train: from then on less than the lead is left, so Slurm signals at once."""
    run = start(steps=LONG, spec_changes={"time_limit_s": 3600, "signal_lead_s": 600})
    wait_until_training(run)
    slurm.run("scontrol", "update", f"JobId={job_id(run)}", "TimeLimit=8")
    wait_for(run.attempt(0).end.exists, "the first attempt has ended")
    outcome = read_json(run.attempt(0).outcome)
    assert outcome is not None and outcome["reason"] == "signal SIGUSR2"
    assert decision(run.attempt(0)) == "requeue"
    # Cancelled any sooner, its shell would ask for the requeue all the same and wait for Slurm's KILL.
    wait_for(lambda: job_state(job_id(run)).phase == "waiting" or len(run.attempt_list()) > 1, "it is queued again")


def test_a_folder_with_an_awkward_name(start: Start, tmp_path: Path) -> None:
    run = start(folder=tmp_path / "it's 100% %j mine" / "run")
    wait_until_ended(run)
    assert run.finished.exists()
    assert run.slurm_log(job_id(run)).exists()
    assert len(list(run.attempt(0).path.glob("rank-*.log"))) == 8


def test_a_plan_for_other_nodes_than_slurm_gives(start: Start, slurm: SlurmSandbox) -> None:
    """A hand that changes --nodes gets a new plan."""
    run = start(steps=30, held=1, overrides=["parallel.num_microbatches=auto", "parallel.microbatch_size=auto"])
    wait_until_training(run)
    cancel(run, [submission for submission, _ in live_submissions(run)])
    by_hand = slurm.submit("--nodes=1", run.script)
    wait_for(lambda: not job_state(by_hand).is_live, "the job on one node has ended")
    second = run.attempt(1)
    assert second.hosts.read_text().split() == [second.hosts.read_text().split()[0]] * 4
    assert run.finished.exists()


def test_a_job_queued_again_by_hand_goes_on(start: Start, slurm: SlurmSandbox) -> None:
    """Slurm has queued it already when the script asks: no failure, and no cancelled job either."""
    run = start(steps=30, held=1)
    wait_until_training(run)
    slurm.run("scontrol", "requeue", job_id(run))
    wait_for(lambda: len(run.attempt_list()) == 2, "the second attempt has begun")
    wait_until_ended(run)
    assert run.finished.exists()
    assert decision(run.attempt(0)) in {"queued", None}
