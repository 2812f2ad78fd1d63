"""Ends a run's job so that it does not queue itself again, and waits until nothing of it runs."""

from __future__ import annotations

import contextlib
import signal
import time

import psutil

from hpjob.core.errors import EnvironmentProblemError, SlurmRefusedError
from hpjob.core.run_dir import RunDir
from hpjob.core.run_records import read_json, write_json
from hpjob.slurm.commands import run_command
from hpjob.slurm.live import Submission, local_process, runs_elsewhere
from hpjob.slurm.query import job_state, wait_until_gone

# Ranks that are told to stop save first; Slurm itself gives them its KillWait, 30 s on most sites.
LOCAL_GRACE_S = 30.0
SLURM_WAIT_S = 300.0
AGAIN_S = 5.0
"""After how long a job that is alive all the same is told again."""


def cancel(run: RunDir, submissions: list[Submission]) -> None:
    """Mark the run as cancelled, end its jobs and wait for their last process.

    Args:
        run: The run.
        submissions: Its jobs that are alive.

    Raises:
        SlurmRefusedError: Slurm does not let this person end the job.
        EnvironmentProblemError: Something of the job still runs after a long wait, or it runs on another machine.
    """
    for submission in submissions:
        if runs_elsewhere(submission):
            raise EnvironmentProblemError(
                f"job {submission.job_id} runs without Slurm on {submission.host}: its processes cannot be ended here",
                hint=f"on {submission.host}: hpjob cancel {run.path}",
            )
    # First the mark: a job that is just ending must already see it.
    ids = [submission.job_id for submission in submissions]
    write_json(run.cancelled, {"version": 1, "job_ids": ids, "time": time.time()})
    on_slurm = [submission.job_id for submission in submissions if submission.executor == "slurm"]
    # Successors first: the end of the job before them would start them.
    for job_id in reversed(on_slurm):
        _scancel(job_id)
    for submission in submissions:
        if submission.executor == "slurm":
            _wait_until_gone(submission.job_id)
        else:
            end_local(run, submission)


def _scancel(job_id: str) -> None:
    result = run_command(["scancel", job_id], timeout_s=60)
    if not result.ok and "invalid job id" not in result.stderr.lower():
        raise SlurmRefusedError(
            f"scancel {job_id}: {result.complaint}", hint="only the job's owner and administrators may cancel it"
        )


def _wait_until_gone(job_id: str) -> None:
    until = time.monotonic() + SLURM_WAIT_S
    while not wait_until_gone(job_id, AGAIN_S):
        if time.monotonic() > until:
            raise EnvironmentProblemError(
                f"job {job_id} is cancelled, but its processes have not ended within {SLURM_WAIT_S:.0f} s",
                hint=f"`squeue -j {job_id}` shows its state; tell your administrator if it stays COMPLETING",
            )
        if job_state(job_id).phase in {"waiting", "running"}:
            # Its script was just queueing it again, which brings a cancelled job back.
            run_command(["scancel", job_id], timeout_s=60)


def end_local(run: RunDir, submission: Submission) -> None:
    """Let the ranks save, as scancel would, then end what is left."""
    controller = local_process(submission)
    if controller is None:
        return
    family = [controller, *_children(controller)]
    launcher = _launcher_pid(run)
    for process in family:
        if process.pid == launcher:
            with contextlib.suppress(psutil.NoSuchProcess):  # it was just ending by itself
                process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(family, timeout=LOCAL_GRACE_S if launcher in {p.pid for p in family} else 0)
    # The controller first: it would start the launcher again.
    left = [process for process in [controller, *_children(controller), *alive] if process.is_running()]
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=10)


def _launcher_pid(run: RunDir) -> int | None:
    attempts = run.attempt_list()
    document = read_json(attempts[-1].launcher) if attempts else None
    return int(document["pid"]) if document and "pid" in document else None


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []
