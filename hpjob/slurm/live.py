"""Whether some job of a run is alive: two jobs in one run folder would destroy each other's files."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Literal

import psutil

from hpjob.core.errors import UserInputError
from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import append_json_line, read_json, read_json_lines
from hpjob.slurm.query import JobState, job_state

ExecutorName = Literal["slurm", "local"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """One line of ``jobs.jsonl``."""

    job_id: str
    executor: ExecutorName
    submitted_at: float
    host: str | None = None
    """Local jobs only: the machine that runs it."""
    process_created_at: float | None = None
    """Local jobs only: tells the process from a later one with the same number."""


def read_submissions(run: RunDir) -> list[Submission]:
    """Return all submissions of a run, oldest first, jobs of a plain ``sbatch`` included."""
    found = [
        Submission(
            job_id=str(line["job_id"]),
            executor="local" if line.get("executor") == "local" else "slurm",
            submitted_at=float(line.get("submitted_at", 0)),
            host=line.get("host"),
            process_created_at=line.get("process_created_at"),
        )
        for line in read_json_lines(run.jobs)
        if "job_id" in line
    ]
    known = {submission.job_id for submission in found}
    for attempt in run.attempt_list():
        document = read_json(attempt.attempt_json) or {}
        job_id = str(document.get("job_id", ""))
        if job_id and job_id not in known and document.get("executor") == "slurm":
            known.add(job_id)
            found.append(Submission(job_id=job_id, executor="slurm", submitted_at=float(document["started_at"])))
    return sorted(found, key=lambda submission: submission.submitted_at)


def record_submission(run: RunDir, submission: Submission) -> None:
    """Append a submission to ``jobs.jsonl``."""
    document = {"job_id": submission.job_id, "executor": submission.executor, "submitted_at": submission.submitted_at}
    if submission.executor == "local":
        document |= {"host": submission.host, "process_created_at": submission.process_created_at}
    append_json_line(run.jobs, document)


def submission_state(submission: Submission) -> JobState:
    """Return the state of a submitted job, whoever runs it."""
    if submission.executor == "slurm":
        return job_state(submission.job_id)
    if submission.host != socket.gethostname():
        return JobState(
            job_id=submission.job_id,
            phase="unknown",
            state="?",
            reason="",
            words=f"runs without Slurm on {submission.host}; ask there",
        )
    alive = local_process(submission) is not None
    return JobState(
        job_id=submission.job_id,
        phase="running" if alive else "stopped",
        state="RUNNING" if alive else "ENDED",
        reason="",
        words="running on this machine" if alive else "ended",
    )


def local_process(submission: Submission) -> psutil.Process | None:
    """Return the process that controls a local job, None when it has ended."""
    try:
        process = psutil.Process(int(submission.job_id))
        same = abs(process.create_time() - (submission.process_created_at or 0)) < 1.0
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, ValueError):
        return None


def live_submissions(run: RunDir) -> list[tuple[Submission, JobState]]:
    """Return the jobs of a run that wait, run or still have processes, oldest first."""
    states = [(submission, submission_state(submission)) for submission in read_submissions(run)]
    return [(submission, state) for submission, state in states if state.is_live]


def refuse_second_job(run: RunDir, *, job_id: str) -> None:
    """Refuse to begin an attempt while the newest one, of another job, still runs.

    Raises:
        UserInputError: It does.
    """
    attempts = run.attempt_list()
    other = _owner(attempts[-1]) if attempts else None
    if other is None or other.job_id == job_id:
        return
    known = {submission.job_id: submission for submission in read_submissions(run)}
    state = submission_state(known.get(other.job_id, other))
    if state.phase in {"running", "ending"}:
        raise UserInputError(
            f"the run is already running in job {other.job_id}",
            hint=f"wait for it or end it with `hpjob cancel {run.path}`",
        )


def _owner(attempt: AttemptDir) -> Submission | None:
    document = read_json(attempt.attempt_json)
    if document is None or "job_id" not in document:
        return None
    return Submission(
        job_id=str(document["job_id"]),
        executor="local" if document.get("executor") == "local" else "slurm",
        submitted_at=float(document.get("started_at", 0)),
        host=document.get("batch_host"),
    )
