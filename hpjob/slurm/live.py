"""Whether some job of a run is alive: two jobs in one run folder would destroy each other's files."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from hpjob.core.errors import UserInputError
from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import append_json_line, read_json, read_json_lines
from hpjob.slurm.query import JobState, job_state

ExecutorName = Literal["slurm", "local"]
SILENCE_S = 120.0
"""How long a silent controller is asked again before a job gives up to enter a run."""


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
    after: str | None = None
    """Successors only: the job whose end it waits for."""


def read_submissions(run: RunDir) -> list[Submission]:
    """Return all submissions of a run, oldest first, jobs of a plain ``sbatch`` included.

    Jobs that a damaged ``jobs.jsonl`` no longer names are known from their attempts and from submitit's files.
    """
    found = {
        submission.job_id: submission
        for line in read_json_lines(run.jobs)
        if (submission := _submission(line)) is not None
    }
    for attempt in run.attempt_list():
        document = read_json(attempt.attempt_json) or {}
        job_id = str(document.get("job_id", ""))
        if job_id and job_id not in found and document.get("executor") == "slurm":
            found[job_id] = Submission(job_id=job_id, executor="slurm", submitted_at=_started_at(document))
    if not (run.submitit / "controller.log").exists():
        for path in run.submitit.glob("*_submission.sh"):
            job_id = path.name.removesuffix("_submission.sh")
            if job_id.isdigit() and job_id not in found:
                found[job_id] = Submission(job_id=job_id, executor="slurm", submitted_at=path.stat().st_mtime)
    return sorted(found.values(), key=lambda submission: submission.submitted_at)


def _submission(line: dict[str, Any]) -> Submission | None:
    """Read one line of ``jobs.jsonl``; None for one that names no job."""
    job_id, submitted_at = line.get("job_id"), line.get("submitted_at", 0)
    if job_id is None or not isinstance(submitted_at, int | float):
        return None
    return Submission(
        job_id=str(job_id),
        executor="local" if line.get("executor") == "local" else "slurm",
        submitted_at=float(submitted_at),
        host=line.get("host"),
        process_created_at=line.get("process_created_at"),
        after=str(line["after"]) if line.get("after") else None,
    )


def _started_at(document: dict[str, Any]) -> float:
    value = document.get("started_at")
    return float(value) if isinstance(value, int | float) else 0.0


def record_submission(run: RunDir, submission: Submission) -> None:
    """Append a submission to ``jobs.jsonl``."""
    document = {"job_id": submission.job_id, "executor": submission.executor, "submitted_at": submission.submitted_at}
    if submission.executor == "local":
        document |= {"host": submission.host, "process_created_at": submission.process_created_at}
    if submission.after is not None:
        document["after"] = submission.after
    append_json_line(run.jobs, document)


def submission_state(submission: Submission) -> JobState:
    """Return the state of a submitted job, whoever runs it."""
    if submission.executor == "slurm":
        return job_state(submission.job_id)
    if runs_elsewhere(submission):
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


def runs_elsewhere(submission: Submission) -> bool:
    """Whether a job runs without Slurm on another machine, whose processes cannot be seen from here."""
    return submission.executor == "local" and submission.host != socket.gethostname()


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


def waiting_successors(run: RunDir) -> list[Submission]:
    """Return the jobs that wait for the end of another job of the run."""
    waiting = (submission for submission in read_submissions(run) if submission.after is not None)
    return [submission for submission in waiting if submission_state(submission).phase == "waiting"]


def current_submission(run: RunDir) -> tuple[Submission, JobState] | None:
    """Return the job that a person means by "the run's job": the newest, but no successor that has not had its turn."""
    begun = {str((read_json(attempt.attempt_json) or {}).get("job_id")) for attempt in run.attempt_list()}
    found: tuple[Submission, JobState] | None = None
    for submission in reversed(read_submissions(run)):
        state = submission_state(submission)
        found = found or (submission, state)
        waits = state.phase == "waiting" and state.reason == "Dependency"
        no_turn = submission.after is not None and submission.job_id not in begun and (waits or not state.is_live)
        if not no_turn:
            return submission, state
    return found


def refuse_second_job(run: RunDir, *, job_id: str) -> None:
    """Refuse to begin an attempt while the newest one still runs.

    The newest attempt's folder is the run's lock: it appears with the name of its job in it, or not at all, and
    counts only as long as that start of that job lives.

    Raises:
        UserInputError: It does, or Slurm does not say.
    """
    attempts = run.attempt_list()
    other = _owner(attempts[-1]) if attempts else None
    if other is None or other.job_id == job_id or attempts[-1].end.exists():
        return
    known = {submission.job_id: submission for submission in read_submissions(run)}
    state = _patient_state(known.get(other.job_id, other))
    if state.phase in {"running", "ending", "unknown"}:
        raise UserInputError(
            f"the run is already running in job {other.job_id}"
            if state.phase != "unknown"
            else f"whether job {other.job_id} still runs the run is not known: {state.words}",
            hint=f"wait for it or end it with `hpjob cancel {run.path}`",
        )


def _patient_state(submission: Submission) -> JobState:
    """Ask for a job's state, again for a while when Slurm is silent."""
    end = time.monotonic() + (SILENCE_S if submission.executor == "slurm" else 0.0)
    while (state := submission_state(submission)).phase == "unknown" and time.monotonic() < end:
        time.sleep(2.0)
    return state


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
