"""Successors: where Slurm cancels what it preempts, a run's next job waits in the queue for the end of the last."""

from __future__ import annotations

import contextlib
import logging
import time

from hpjob.core.errors import SlurmRefusedError
from hpjob.core.run_dir import RunDir
from hpjob.core.run_records import read_json
from hpjob.slurm.commands import run_command
from hpjob.slurm.live import Submission, read_submissions, record_submission, submission_state, waiting_successors

logger = logging.getLogger("hpjob")


def is_chained(run: RunDir) -> bool:
    """Return whether jobs of the run have successors instead of being queued again."""
    return bool((read_json(run.spec) or {}).get("chain"))


def queue_successor(run: RunDir, job_id: str) -> str:
    """Submit the run's script once more, to start when ``job_id`` has ended, however that ends; return its id.

    Raises:
        SlurmRefusedError: Slurm does not take it, for instance because the person may not have a second job.
        OSError: It cannot be noted in the run folder; it has been cancelled again.
    """
    from hpjob.slurm.executor import ScriptExecutor  # noqa: PLC0415

    script = run.script.read_text(encoding="utf-8")
    executor = ScriptExecutor(run.submitit, script, options=(f"--dependency=afterany:{job_id}",))
    successor = executor.submit_script()
    note_or_cancel(run, Submission(job_id=successor, executor="slurm", submitted_at=time.time(), after=job_id))
    return successor


def note_or_cancel(run: RunDir, submission: Submission) -> None:
    """Note a Slurm job in ``jobs.jsonl``; a job that cannot be noted is cancelled, for nobody would find it.

    Raises:
        OSError: No space or no permission.
    """
    try:
        record_submission(run, submission)
    except OSError:
        run_command(["scancel", submission.job_id], timeout_s=60)
        raise


def ensure_successor(run: RunDir, job_id: str) -> bool:
    """Make sure that a job waits for the end of ``job_id``; return whether one does."""
    if any(submission.after == job_id for submission in waiting_successors(run)):
        return True
    try:
        successor = queue_successor(run, job_id)
    except SlurmRefusedError as error:
        logger.warning("no successor could be queued: %s", error.message)
        return False
    except OSError as error:
        logger.warning("no successor could be noted in the run folder: %s", error)
        return False
    logger.info("job %s waits to go on when this one ends", successor)
    return True


def cancel_successors(run: RunDir) -> list[str]:
    """Cancel the jobs that wait for another job of the run; return their ids."""
    ids = [submission.job_id for submission in waiting_successors(run)]
    for job_id in ids:
        run_command(["scancel", job_id], timeout_s=60)
    return ids


def why_not_to_go_on(run: RunDir, job_id: str) -> str | None:
    """Return why a job has nothing to do: it or the one before it was stopped for good; None when it goes on."""
    if job_id in (read_json(run.cancelled) or {}).get("job_ids", []):
        return f"job {job_id} was cancelled"
    by_id = {submission.job_id: submission for submission in read_submissions(run)}
    own = by_id.get(job_id)
    before = by_id.get(own.after) if own is not None and own.after is not None else None
    if before is None:
        return None
    with contextlib.suppress(StopIteration):
        attempt = next(
            attempt
            for attempt in reversed(run.attempt_list())
            if (read_json(attempt.attempt_json) or {}).get("job_id") == before.job_id
        )
        end = read_json(attempt.end) or {}
        if end.get("decision") == "stop":
            return f"job {before.job_id} stopped: {end.get('reason')}"
    if submission_state(before).state == "CANCELLED":
        return f"job {before.job_id} was cancelled"
    return None
