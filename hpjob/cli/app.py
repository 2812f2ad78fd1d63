"""Entry point of the ``hpjob`` command: options, and errors turned into text and exit codes."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

import hpjob
from hpjob.cli import (
    cancel,
    checkpoints,
    data,
    export,
    logs,
    nodes,
    plan,
    recipes,
    rehearse,
    resume,
    status,
    submit,
    topology,
)
from hpjob.core.errors import ExitCode, HpjobError

app = typer.Typer(
    name="hpjob",
    help="From a Slurm cluster to a running, fast, restartable training job.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for command in (
    plan,
    rehearse,
    recipes,
    submit,
    status,
    logs,
    checkpoints,
    cancel,
    resume,
    export,
    nodes,
    data,
    topology,
):
    command.register(app)

# typer brings its own click or uses the installed one; this is that one's base of usage errors.
_UsageError: Any = typer.BadParameter.__mro__[2]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"hpjob {hpjob.__version__}")
        raise typer.Exit


@app.callback()
def _options(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True)) -> None:
    """From a Slurm cluster to a running, fast, restartable training job."""


def main() -> None:
    """Run the command; every :class:`HpjobError` becomes a message, a hint and its exit code."""
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except HpjobError as error:
        _complain(error.message, error.hint)
        sys.exit(int(error.exit_code))
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # `hpjob` or `hpjob data` alone: the text is the help
            typer.echo(error.format_message(), err=True)
            sys.exit(int(ExitCode.USER_INPUT))
        path = error.ctx.command_path if error.ctx is not None else "hpjob"
        _complain(error.format_message(), f"`{path} --help` lists what it takes")
        sys.exit(int(ExitCode.USER_INPUT))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(int(ExitCode.INTERRUPTED))
    except BrokenPipeError:
        # Whoever read our output has seen enough; nothing may be flushed into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(int(ExitCode.DONE))


def _complain(message: str, hint: str) -> None:
    typer.echo("\n".join(f"error: {line}" for line in message.splitlines()), err=True)
    typer.echo(f"\nhint: {hint}", err=True)
