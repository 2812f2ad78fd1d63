"""``hpjob status``: where a run stands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hpjob.core.quantity import duration

if TYPE_CHECKING:
    from hpjob.cli.run_status import RunStatus
    from hpjob.report.read import RunRecord
    from hpjob.report.timeline import Accounting, AttemptSummary

__all__ = ["as_document", "as_lines", "duration", "register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="status")(status)


def status(
    run: str | None = typer.Argument(None, help="Name, folder or job id of a run. [default: the newest]"),
    run_dir: Path = typer.Option(Path("runs"), "--run-dir", help="Folder of all runs."),
    watch: bool = typer.Option(False, "--watch", "-w", help="Show progress until the run ends."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Say whether a run waits, trains, stopped or finished, why, and how to go on."""
    import json

    from hpjob.cli.find_run import find_run
    from hpjob.cli.run_status import run_status
    from hpjob.cli.watch import watch_run

    found = find_run(run, run_dir)
    if watch:
        watch_run(found)
    current = run_status(found)
    if as_json:
        typer.echo(json.dumps(as_document(current), indent=2))
    else:
        typer.echo("\n".join(as_lines(current)))


def as_document(current: RunStatus) -> dict[str, Any]:
    """Return a status as plain data."""
    from dataclasses import asdict
    from math import isfinite

    record, submission, job = current.record, current.submission, current.job
    last, attempt, failure = record.last_step, record.last_attempt, current.failure
    attempts, account, _ = _story(current)
    return {
        "version": 1,
        "run": record.files.name,
        "run_dir": str(record.files.path),
        "state": current.state,
        "why": current.why,
        "how_to_go_on": current.how_to_go_on,
        "job_id": submission.job_id if submission else None,
        "successors": list(current.successors),
        "executor": submission.executor if submission else None,
        "slurm_state": job.state if job and submission and submission.executor == "slurm" else None,
        "slurm_reason": job.reason if job else None,
        "nodes": list(attempt.hostnames) if attempt else [],
        "attempts": len(record.attempts),
        "damaged_attempts": [files.index for files in record.damaged],
        "step": last.step if last else 0,
        "total_steps": record.total_steps,
        "loss": last.loss if last and isfinite(last.loss) else None,
        "tokens_per_s": record.tokens_per_s,
        "seconds_left": record.seconds_left,
        "checkpoint_step": record.checkpoint_step,
        "save_problem": attempt.save_problem if attempt else None,
        "first_failure": asdict(failure) if failure else None,
        "attempt_list": [asdict(summary) for summary in attempts],
        "steps_lost": account.steps_lost,
        "loss_faults": sum(one.loss_faults for one in record.attempts),
        "goodput": account.goodput,
        "goodput_of_wall": account.goodput_of_wall,
        "seconds": {
            "wall": account.wall_s,
            "queued": account.queued_s,
            "held": account.held_s,
            "steps": account.step_s,
        },
    }


def as_lines(current: RunStatus) -> list[str]:
    """Return a status as text; the first failing rank and its traceback come last."""
    from hpjob.cli.run_status import damaged_words
    from hpjob.report.timeline_text import attempt_lines

    record, submission = current.record, current.submission
    by = f"{submission.executor} job {submission.job_id}" if submission else "no job"
    if current.successors:
        by += f" (then {', '.join(current.successors)})"
    lines = [f"{record.files.name}: {current.state}, {current.why}", ""]
    if record.plan is not None:
        lines.append(f"  plan        {record.plan.summary}")
    lines.append(f"  job         {by}, {_attempts(len(record.attempts))}{_start_words(current)}")
    lines.append(f"  step        {_progress(current)}")
    lines.append(f"  checkpoint  {_checkpoint(record)}")
    attempts, account, now = _story(current)
    lines += _time_lines(record, account) if attempts else []
    lines.append(f"  folder      {record.files.path}")
    lines += ["", "attempts:", *attempt_lines(attempts, now)] if attempts else []
    lines += ["", *(f"{damaged_words(files)}, nor counted above" for files in record.damaged)] if record.damaged else []
    failure, attempt = current.failure, record.last_attempt
    if failure is not None and attempt is not None:
        lines += ["", f"rank {failure.rank} on {failure.node} failed first ({failure.kind}):", ""]
        lines += [f"  {line}" for line in (failure.traceback or failure.message).rstrip().splitlines()[-12:]]
        lines += ["", f"full log: {attempt.files.rank_log(failure.rank)}"]
    if current.how_to_go_on:
        lines += ["", f"next: {current.how_to_go_on}"]
    return lines


def _story(current: RunStatus) -> tuple[list[AttemptSummary], Accounting, float]:
    """Return the attempts, where the time went, and now."""
    import time

    from hpjob.report.timeline import accounting, summaries

    now = time.time()
    attempts = summaries(current.record, live=current.state == "running", now=now)
    return attempts, accounting(current.record, attempts, now=now), now


def _time_lines(record: RunRecord, account: Accounting) -> list[str]:
    from hpjob.report.timeline_text import accounting_line

    lines = [f"  goodput     {accounting_line(account)}"]
    faults = sum(attempt.loss_faults for attempt in record.attempts)
    if faults:
        lines.append(f"  losses      {faults} step{'' if faults == 1 else 's'} with a spike or NaN, see events.jsonl")
    return lines


def _attempts(count: int) -> str:
    return f"{count} attempt{'' if count == 1 else 's'}"


def _start_words(current: RunStatus) -> str:
    job = current.job
    if job is None:
        return ""
    if job.starts_at:
        return f", expected to start at {job.starts_at}"
    return f", {job.time_left} left" if job.time_left and job.time_left != "UNLIMITED" else ""


def _progress(current: RunStatus) -> str:
    record = current.record
    last = record.last_step
    total = record.total_steps if record.total_steps is not None else "?"
    if last is None:
        return f"0 of {total}"
    text = f"{last.step} of {total}, loss {last.loss:.4f}, {record.tokens_per_s or 0:,.0f} tokens/s"
    if current.state == "running" and record.seconds_left:
        text += f", {duration(record.seconds_left)} left"
    return text


def _checkpoint(record: RunRecord) -> str:
    text = f"step {record.checkpoint_step}" if record.checkpoint_step else "none yet"
    problem = record.last_attempt.save_problem if record.last_attempt else None
    return f"{text}; {problem}" if problem else text
