"""``hpjob submit``: plan, job script, queue."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from hpjob.slurm.prepare import Prepared


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="submit")(submit)


def submit(
    recipe: str = typer.Option(..., "--recipe", "-r", help="Packaged recipe or a .yaml file."),
    nodes: int = typer.Option(..., "--nodes", "-N", min=1, help="Number of nodes."),
    machine: str | None = typer.Option(None, "--machine", help="Plan for this kind of node instead of asking Slurm."),
    overrides: list[str] = typer.Option([], "--set", help="Change a value: --set training.steps=500. Repeatable."),
    name: str | None = typer.Option(None, "--name", "-J", help="Name of the run. [default: RECIPE-NNN]"),
    partition: str | None = typer.Option(None, "--partition", "-p", help="Slurm partition."),
    account: str | None = typer.Option(None, "--account", "-A", help="Slurm account."),
    qos: str | None = typer.Option(None, "--qos", "-q", help="Slurm quality of service."),
    time: str | None = typer.Option(None, "--time", "-t", help="Time limit of one attempt: 90m, 12h, 1-00:00:00."),
    run_dir: Path = typer.Option(Path("runs"), "--run-dir", help="Folder of all runs; nodes must see the same path."),
    executor: str = typer.Option("auto", "--executor", help="auto, slurm, or local (this machine, no Slurm)."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the job script, submit nothing."),
    watch: bool = typer.Option(False, "--watch", "-w", help="Show progress until the run ends."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
    sbatch_options: list[str] | None = typer.Argument(None, metavar="[-- SBATCH OPTIONS]", show_default=False),
) -> None:
    """Plan a run, write its folder and put it in the queue.

    Example: hpjob submit --nodes 4 --recipe 7b --time 12h -- --constraint=a100
    """
    from hpjob.slurm.prepare import Request, prepare

    request = Request(
        recipe=recipe,
        nodes=nodes,
        machine=machine,
        overrides=overrides,
        name=name,
        partition=partition,
        account=account,
        qos=qos,
        time=time,
        runs=run_dir,
        executor=executor,
        dry_run=dry_run,
        sbatch_options=sbatch_options or [],
    )
    prepared = prepare(request)
    _show_plan(prepared, quiet=as_json)
    if dry_run:
        print_script(prepared, as_json=as_json)
        return
    _confirm(prepared, yes=yes or as_json)
    _submit(prepared, as_json=as_json, watch=watch)


def _show_plan(prepared: Prepared, *, quiet: bool) -> None:
    from hpjob.plan.explain import render_plan

    if not quiet:
        typer.echo(render_plan(prepared.plan), err=True)
    for note in (*prepared.topology.notes, *prepared.notes):
        typer.echo(f"note: {note}", err=True)


def print_script(prepared: Prepared, *, as_json: bool) -> None:
    """Print the job script that would be submitted, alone or in a JSON document."""
    import json

    if as_json:
        document = {"version": 1, "run_dir": str(prepared.run.path), "executor": prepared.executor}
        typer.echo(json.dumps(document | {"notes": prepared.notes, "script": prepared.script}, indent=2))
    else:
        typer.echo(prepared.script, nl=False)


def _confirm(prepared: Prepared, *, yes: bool) -> None:
    import sys

    if not yes and sys.stdin.isatty() and sys.stderr.isatty():
        spec = prepared.spec
        where = f"partition {spec.partition or '(default)'}" if prepared.executor == "slurm" else "this machine"
        typer.confirm(f"Start {spec.nodes} x {spec.ranks_per_node} ranks on {where}?", abort=True, err=True)


def _submit(prepared: Prepared, *, as_json: bool, watch: bool) -> None:
    import json
    import sys

    from hpjob.cli.find_run import run_argument
    from hpjob.slurm.submit import confirm_continuation, write_and_submit

    job_id = write_and_submit(prepared, ["hpjob", *sys.argv[1:]])
    run = prepared.run
    news = confirm_continuation(prepared, job_id)
    if as_json:
        document = {"version": 1, "run": run.name, "run_dir": str(run.path), "job_id": job_id}
        document |= {"executor": prepared.executor, "notes": [*prepared.notes, *news]}
        typer.echo(json.dumps(document, indent=2))
    else:
        for note in news:
            typer.echo(f"note: {note}", err=True)
        kind = "Slurm job" if prepared.executor == "slurm" else "local job"
        typer.echo(f"submitted {run.name} as {kind} {job_id}; everything is in {run.path}")
    if watch:
        from hpjob.cli.watch import watch_run

        watch_run(run)
    elif not as_json:
        typer.echo(f"\nnext: hpjob status {run_argument(run)} --watch    hpjob logs {run_argument(run)}", err=True)
