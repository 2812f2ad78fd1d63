"""``hpjob resume``: go on with a run that stopped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from hpjob.slurm.resume import Resumption


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="resume")(resume)


def resume(
    run: str | None = typer.Argument(None, help="Name, folder or job id of a run. [default: the newest]"),
    run_dir: Path = typer.Option(Path("runs"), "--run-dir", help="Folder of all runs."),
    nodes: int | None = typer.Option(None, "--nodes", "-N", min=1, help="Number of nodes. [default: as before]"),
    executor: str = typer.Option("auto", "--executor", help="auto (as before), slurm, or local."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the job script, submit nothing."),
    watch: bool = typer.Option(False, "--watch", "-w", help="Show progress until the run ends."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Submit a run again: same folder, newest checkpoint; another number of nodes gets a new plan."""
    from hpjob.cli.find_run import find_run
    from hpjob.cli.submit import print_script
    from hpjob.slurm.resume import prepare_resume

    found = find_run(run, run_dir)
    if found.finished.exists():
        _say_finished(found.name, as_json=as_json)
        return
    resumption = prepare_resume(found, nodes=nodes, executor=executor)
    for line in (*resumption.changes, *(f"note: {note}" for note in resumption.prepared.notes)):
        typer.echo(line, err=True)
    if dry_run:
        print_script(resumption.prepared, as_json=as_json)
        return
    _confirm(resumption, yes=yes or as_json)
    _submit(resumption, as_json=as_json, watch=watch)


def _say_finished(name: str, *, as_json: bool) -> None:
    import json

    if as_json:
        typer.echo(json.dumps({"version": 1, "run": name, "finished": True, "job_id": None}, indent=2))
    else:
        typer.echo(f"{name} is finished, there is nothing to resume")


def _confirm(resumption: Resumption, *, yes: bool) -> None:
    import sys

    if resumption.changes and not yes and sys.stdin.isatty():
        typer.confirm("Go on with the new plan?", abort=True, err=True)


def _submit(resumption: Resumption, *, as_json: bool, watch: bool) -> None:
    import json
    import sys

    from hpjob.cli.find_run import run_argument
    from hpjob.core.run_records import newest_checkpoint_step
    from hpjob.slurm.submit import confirm_continuation, submit_again

    prepared = resumption.prepared
    run = prepared.run
    step = newest_checkpoint_step(run)
    job_id = submit_again(prepared, ["hpjob", *sys.argv[1:]])
    for note in confirm_continuation(prepared, job_id):
        typer.echo(f"note: {note}", err=True)
    if as_json:
        document = {"version": 1, "run": run.name, "run_dir": str(run.path), "finished": False, "job_id": job_id}
        document |= {"executor": prepared.executor, "from_step": step, "changes": list(resumption.changes)}
        typer.echo(json.dumps(document, indent=2))
    else:
        kind = "Slurm job" if prepared.executor == "slurm" else "local job"
        typer.echo(f"resumed {run.name} from step {step} as {kind} {job_id}")
    if watch:
        from hpjob.cli.watch import watch_run

        watch_run(run)
    elif not as_json:
        typer.echo(f"\nnext: hpjob status {run_argument(run)} --watch", err=True)
