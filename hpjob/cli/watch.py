"""Progress of a run until it ends: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import typer

from hpjob.cli.find_run import run_argument
from hpjob.cli.run_status import RunStatus, run_status
from hpjob.core.quantity import duration
from hpjob.core.run_dir import RunDir
from hpjob.slurm.live import read_submissions, runs_elsewhere
from hpjob.slurm.query import JobState

_POLL_S = 1.0
# The queue is asked less often than the files of a running job: a controller serves many people.
_QUEUE_POLL_S = 5.0
_LINE_EVERY_S = 10.0


def watch_run(run: RunDir) -> None:
    """Show progress until the run neither waits nor runs.

    Ctrl-C ends the watching, never the run.
    """
    submissions = read_submissions(run)
    if submissions and runs_elsewhere(submissions[-1]):
        typer.echo(
            f"{run.name} runs without Slurm on {submissions[-1].host}: its files show its steps here, but not "
            f"whether its processes still live (`hpjob status {run_argument(run)}` there does)",
            err=True,
        )
    try:
        if sys.stderr.isatty():
            _watch_on_terminal(run)
        else:
            _watch_in_lines(run)
    except KeyboardInterrupt:
        typer.echo(f"\nstopped watching; {run.name} goes on (`hpjob status {run_argument(run)}`)", err=True)
        raise


def _updates(run: RunDir) -> Iterator[RunStatus]:
    """Yield where the run stands, again and again; the last one is where it ended."""
    asked_at = 0.0
    known: JobState | None = None
    while True:
        if time.monotonic() - asked_at > _QUEUE_POLL_S:
            known, asked_at = None, time.monotonic()
        status = run_status(run, known)
        known = status.job if status.state == "running" else None
        yield status
        if status.state not in {"waiting", "running", "unknown"}:
            return
        time.sleep(_POLL_S if status.state == "running" else _QUEUE_POLL_S)


def _watch_in_lines(run: RunDir) -> None:
    shown: tuple[str, str] | None = None
    shown_at = 0.0
    for status in _updates(run):
        news = (status.state, status.why)
        if news != shown or time.monotonic() - shown_at > _LINE_EVERY_S:
            typer.echo(f"{status.state}: {status.why}; {_numbers(status)}", err=True)
            shown, shown_at = news, time.monotonic()


def _watch_on_terminal(run: RunDir) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    # A fixed width: beside long text an elastic bar shrinks to nothing on a terminal of 80 columns.
    bar = BarColumn(bar_width=14)
    columns = (TextColumn("{task.description}"), bar, TextColumn("{task.completed:.0f}/{task.total:.0f}"))
    with Progress(*columns, TextColumn("{task.fields[numbers]}"), console=Console(stderr=True)) as progress:
        task = progress.add_task(run.name, total=1, numbers="")
        for status in _updates(run):
            last, total = status.record.last_step, status.record.total_steps
            progress.update(
                task,
                description=f"{run.name}: {status.state}",
                total=total or 1,
                completed=last.step if last else 0,
                numbers=_short_numbers(status) if status.state == "running" and last else status.why,
            )


def _short_numbers(status: RunStatus) -> str:
    """Return what stands behind the bar, which tells the step itself."""
    record = status.record
    loss = f"loss {record.last_step.loss:.3f}" if record.last_step else ""
    left = f"  {duration(record.seconds_left)} left" if record.seconds_left else ""
    return f"{loss}  {record.tokens_per_s or 0:,.0f} tokens/s{left}"


def _numbers(status: RunStatus) -> str:
    record = status.record
    last = record.last_step
    if last is None:
        return f"step 0 of {record.total_steps or '?'}"
    left = f", {duration(record.seconds_left)} left" if record.seconds_left and status.state == "running" else ""
    return (
        f"step {last.step} of {record.total_steps or '?'}, loss {last.loss:.4f}, "
        f"{record.tokens_per_s or 0:,.0f} tokens/s{left}"
    )
