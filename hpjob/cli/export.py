"""``hpjob export``: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import typer

from hpjob.cli.find_run import RUN_HELP, RUNS_HELP


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="export")(export)


def export(
    run: str | None = typer.Argument(None, help=RUN_HELP),
    to: Path = typer.Option(..., "--to", help="Folder to make."),
    step: int | None = typer.Option(None, "--step", min=1, help="Checkpoint to take. [default: the newest]"),
    dtype: str | None = typer.Option(None, "--dtype", help="bf16, fp16 or fp32. [default: the recipe's precision]"),
    max_shard_gb: float = typer.Option(5.0, "--max-shard-gb", min=0.001, help="Size of the largest file."),
    run_dir: Path = typer.Option(Path("runs"), "--run-dir", help=RUNS_HELP),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Write config, safetensors and tokenizer of a run's checkpoint; transformers loads the folder. Needs no GPU."""
    import json

    from hpjob.cli.find_run import find_run
    from hpjob.core.errors import EnvironmentProblemError

    found = find_run(run, run_dir)
    try:
        from hpjob.runtime.hugging_face.export import export_run
    except ImportError as error:
        raise EnvironmentProblemError(
            f"package {error.name} is not installed", hint="install it with `pip install 'hpjob[train]'`"
        ) from None
    result = export_run(found, to, step=step, dtype=dtype, max_shard_bytes=round(max_shard_gb * 1e9))
    for note in result.notes:
        typer.echo(f"note: {note}", err=True)
    if as_json:
        document = {"version": 1, "run": found.name, "step": result.step, "folder": str(result.folder)}
        typer.echo(json.dumps(document | {"dtype": result.dtype, "size_bytes": result.size_bytes}, indent=2))
        return
    gigabytes = result.size_bytes / 1e9
    size = f"{gigabytes:.2f} GB" if gigabytes >= 0.1 else f"{gigabytes * 1e3:.2f} MB"
    typer.echo(f"{result.folder}: step {result.step} of {found.name}, {size} of {result.dtype} weights")
