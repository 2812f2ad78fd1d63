"""``hpjob cancel``: end a run's job."""

from __future__ import annotations

from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="cancel")(cancel)


def cancel(
    run: str | None = typer.Argument(None, help="Name, folder or job id of a run. [default: the newest]"),
    run_dir: Path = typer.Option(Path("runs"), "--run-dir", help="Folder of all runs."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Say what would be cancelled, cancel nothing."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """End the job of a run and wait until nothing of it is left; its checkpoints stay."""
    import json
    import sys

    from hpjob.cli.find_run import find_run, run_argument
    from hpjob.slurm.cancel import cancel as cancel_jobs
    from hpjob.slurm.live import live_submissions

    found = find_run(run, run_dir)
    alive = [submission for submission, _ in live_submissions(found)]
    ids = [submission.job_id for submission in alive]
    if alive and not dry_run:
        if not (yes or as_json) and sys.stdin.isatty():
            typer.confirm(f"Cancel {found.name} (job {', '.join(ids)})?", abort=True, err=True)
        typer.echo(f"ending job {', '.join(ids)} of {found.name} …", err=True)
        cancel_jobs(found, alive)
    if as_json:
        typer.echo(json.dumps({"version": 1, "run": found.name, "dry_run": dry_run, "job_ids": ids}, indent=2))
    elif not alive:
        typer.echo(f"{found.name} has no job that waits or runs")
    elif dry_run:
        typer.echo(f"would cancel job {', '.join(ids)} of {found.name}")
    else:
        typer.echo(f"cancelled {found.name}; nothing of it runs")
        typer.echo(f"\nnext: hpjob resume {run_argument(found)}", err=True)
