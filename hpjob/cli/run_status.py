"""State of a run in the words a person uses: waiting, running, stopped, finished, and how to go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpjob.cli.find_run import run_argument
from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import Failure
from hpjob.report.read import RunRecord, read_run
from hpjob.slurm.live import Submission, current_submission, read_submissions
from hpjob.slurm.query import JobState

RunState = Literal["waiting", "running", "finished", "stopped", "lost", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """What `hpjob status` says."""

    state: RunState
    why: str
    how_to_go_on: str | None
    submission: Submission | None
    job: JobState | None
    successors: tuple[str, ...] = ()
    """Jobs that wait for the end of this one."""
    record: RunRecord

    @property
    def failure(self) -> Failure | None:
        """The first failing rank of the newest attempt, once that has ended."""
        attempt = self.record.last_attempt
        if attempt is None or self.state == "running" or self.record.newest_is_damaged:
            return None
        return attempt.first_failure


def run_status(run: RunDir, known: JobState | None = None) -> RunStatus:
    """Join what the job's owner (Slurm or this machine) says with what is in the run folder.

    Args:
        run: The run.
        known: State of the newest job when it was asked a moment ago.
    """
    record = read_run(run.path)
    submissions = read_submissions(run)
    submission = next((one for one in submissions if known is not None and one.job_id == known.job_id), None)
    job = known if submission is not None else None
    if submission is None and (current := current_submission(run)) is not None:
        submission, job = current
    successors = tuple(one.job_id for one in submissions if submission is not None and one.after == submission.job_id)
    state, why, next_command = _judge(record, job)
    return RunStatus(
        state=state,
        why=why,
        how_to_go_on=next_command,
        submission=submission,
        job=job,
        successors=successors if job is not None and job.is_live else (),
        record=record,
    )


def _judge(record: RunRecord, job: JobState | None) -> tuple[RunState, str, str | None]:
    name = run_argument(record.files)
    resume = f"hpjob resume {name}"
    if record.finished:
        return "finished", "the last step is done", None
    if job is None:
        damaged = record.files.jobs.exists()
        return "stopped", f"{record.files.jobs.name} is damaged" if damaged else "it was never submitted", resume
    match job.phase:
        case "waiting":
            return "waiting", job.words, None
        case "running" | "ending":
            return "running", _running_words(record, job), None
        case "unknown":
            return "unknown", job.words, None
    why = _stop_reason(record, job)
    if job.phase == "lost" and not why:
        return "lost", ", ".join(filter(None, (job.words, _damaged_record(record)))), resume
    return "stopped", why or job.words, resume


def _running_words(record: RunRecord, job: JobState) -> str:
    attempt = record.last_attempt
    if damaged := _damaged_record(record):
        return f"{job.words}, {damaged}"
    if attempt is None or attempt.job_id != job.job_id:
        return f"{job.words}, its ranks are about to start"
    words = job.words + (f" on {', '.join(attempt.hostnames)}" if job.nodes else "")
    if attempt.ended_at is not None:
        return f"{words}, {attempt.reason}"
    return f"{words}, {attempt.phase}" if attempt.phase and not record.steps else words


def _stop_reason(record: RunRecord, job: JobState) -> str:
    attempt = record.last_attempt
    parts = []
    if record.cancelled:
        parts.append("cancelled")
    elif job.phase == "stopped" and job.state not in {"FAILED", "ENDED"}:
        parts.append(job.words)
    if attempt is not None and attempt.job_id == job.job_id and not record.newest_is_damaged:
        failure = attempt.first_failure
        if failure is not None:
            parts.append(f"rank {failure.rank} on {failure.node} failed first: {first_line(failure)}")
        elif attempt.outcome is not None and attempt.outcome.kind == "preempted":
            parts.append(f"saved at step {attempt.outcome.step} ({attempt.outcome.reason})")
        elif attempt.reason and not parts:
            parts.append(attempt.reason)
    elif job.phase == "stopped" and not parts:
        parts.append(_damaged_record(record) or "its job ended before the ranks started")
    return ", ".join(parts)


def _damaged_record(record: RunRecord) -> str | None:
    """Say that the newest attempt has a record that cannot be read."""
    return damaged_words(record.damaged[-1]) if record.newest_is_damaged else None


def damaged_words(attempt: AttemptDir) -> str:
    """Say of an attempt that its record cannot be read."""
    return f"attempts/{attempt.path.name}/{attempt.attempt_json.name} is damaged: what its ranks did is not known"


def first_line(failure: Failure) -> str:
    """Return a failure in one line."""
    lines = [line for line in failure.message.splitlines() if line.strip()]
    text = lines[0].strip() if lines else failure.kind
    return text if not failure.exception or text.startswith(failure.exception) else f"{failure.exception}: {text}"
