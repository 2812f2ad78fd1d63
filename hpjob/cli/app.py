"""Entry point of the ``hpjob`` command: options, and errors turned into text and exit codes."""

from __future__ import annotations

import sys

import typer

import hpjob
from hpjob.cli import data, plan, recipes
from hpjob.core.errors import ExitCode, HpjobError

app = typer.Typer(
    name="hpjob",
    help="From a Slurm cluster to a running, fast, restartable training job.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"hpjob {hpjob.__version__}")
        raise typer.Exit


@app.callback()
def _options(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True)) -> None:
    """From a Slurm cluster to a running, fast, restartable training job."""


data.register(app)
plan.register(app)
recipes.register(app)


def main() -> None:
    """Run the command; every :class:`HpjobError` becomes a message, a hint and its exit code."""
    try:
        app()
    except HpjobError as error:
        typer.echo("\n".join(f"error: {line}" for line in error.message.splitlines()), err=True)
        typer.echo(f"\nhint: {error.hint}", err=True)
        sys.exit(int(error.exit_code))
    except KeyboardInterrupt:
        sys.exit(int(ExitCode.INTERRUPTED))
