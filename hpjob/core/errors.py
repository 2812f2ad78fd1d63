"""Errors by cause; each cause has its own exit code.

A message says what is wrong in one sentence without a full stop; ``hint`` says what to do next,
where possible as a command to type. The command line turns an :class:`HpjobError` into text and
an exit code in one place (``hpjob.cli.app``); every other exception counts as a bug.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every ``hpjob`` command."""

    DONE = 0
    BUG = 1
    USER_INPUT = 2
    ENVIRONMENT = 3
    NOTHING_FITS = 4
    SLURM_REFUSED = 5
    INTERRUPTED = 130


class HpjobError(Exception):
    """Base of all errors that a person can act on.

    Args:
        message: What is wrong; several problems of one file are joined with newlines.
        hint: What to do about it.
    """

    exit_code: ExitCode = ExitCode.BUG

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UserInputError(HpjobError):
    """The command line, a recipe, a machine file or a data path is wrong."""

    exit_code = ExitCode.USER_INPUT


class EnvironmentProblemError(HpjobError):
    """Something around us is missing or broken: no Slurm, no permission, no space, no package."""

    exit_code = ExitCode.ENVIRONMENT


class NothingFitsError(HpjobError):
    """No plan is legal or fits into memory for the machines that were asked for."""

    exit_code = ExitCode.NOTHING_FITS


class SlurmRefusedError(HpjobError):
    """Slurm answered and said no."""

    exit_code = ExitCode.SLURM_REFUSED
