"""What a job does once its ranks have ended: queue itself again, leave the run to its successor, be done, or stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import newest_checkpoint_step, read_json, read_outcome
from hpjob.slurm.chain import ensure_successor, is_chained
from hpjob.slurm.controller_view import ControllerView, ask_controller
from hpjob.slurm.progress import ATTEMPTS_WITHOUT_PROGRESS, stuck
from hpjob.slurm.srun_log import TaskEnd
from hpjob.slurm.why_ended import Cause, failed_first, why_ended

Decision = Literal["requeue", "queued", "chain", "done", "stop"]
"""``queued`` = Slurm has queued the job again by itself; ``chain`` = the successor goes on."""


def decide(run: RunDir, attempt: AttemptDir, exit_code: int, ends: Sequence[TaskEnd]) -> tuple[Decision, str]:
    """Return the decision and its reason in words."""
    document = read_json(attempt.attempt_json) or {}
    on_slurm = document.get("executor") == "slurm"
    if run.finished.exists():
        return "done", "the last step is done"
    cause = why_ended(attempt, exit_code, ends, on_slurm=on_slurm)
    view = ask_controller(_job_id(document)) if on_slurm else None
    cause = _judged_again(attempt, exit_code, ends, cause, view)
    if run.cancelled.exists():
        return "stop", "cancelled; `hpjob resume` goes on"
    if view is not None and view.looks_cancelled(_restart_count(document)):
        return "stop", "the job was cancelled; `hpjob resume` goes on"
    if cause.kind in {"failed", "unclear"}:
        return "stop", cause.words
    if stuck(run, _job_id(document)):
        return "stop", (
            f"{ATTEMPTS_WITHOUT_PROGRESS} attempts in a row ended without a new checkpoint (step "
            f"{newest_checkpoint_step(run)}), the last one so: {cause.words}; if the time between start and stop is "
            "too short for one, lower checkpoint.every_steps or ask for more time"
        )
    return _go_on(run, document, view), cause.words


def _judged_again(
    attempt: AttemptDir, exit_code: int, ends: Sequence[TaskEnd], cause: Cause, view: ControllerView | None
) -> Cause:
    """Correct what the ranks and srun tell by what Slurm was doing meanwhile.

    srun ends the others of a failed rank with TERM first. They take that for a preemption and save if they still
    can; queuing such a job again would repeat the failure for ever. And ranks that Slurm kills before they have
    saved have not failed.
    """
    if view is None:
        return cause
    outcome = read_outcome(attempt)
    by_term = outcome is not None and "SIGTERM" in outcome.reason
    if cause.kind == "saved" and exit_code and by_term and not view.is_being_ended and failed_first(attempt, ends):
        return Cause(kind="failed", words="the ranks failed")
    if cause.kind == "unclear" and view.is_being_ended:
        return Cause(kind="around", words="Slurm ended the job before the ranks had saved")
    return cause


def _go_on(run: RunDir, document: dict[str, Any], view: ControllerView | None) -> Decision:
    if view is not None and view.queued_again(_restart_count(document)):
        return "queued"
    if is_chained(run) and document.get("executor") == "slurm" and ensure_successor(run, _job_id(document)):
        return "chain"
    return "requeue"


def _job_id(document: dict[str, Any]) -> str:
    return str(document.get("job_id", ""))


def _restart_count(document: dict[str, Any]) -> int:
    return int(document.get("restart_count") or 0)
