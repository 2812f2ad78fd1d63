"""What a person can act on, with the exit codes that ``hpjob`` uses too."""

from __future__ import annotations

USER_INPUT = 2
ENVIRONMENT = 3
INTERRUPTED = 130


class SandboxError(Exception):
    """A mistake or a missing thing.

    Args:
        message: What is wrong.
        hint: What to do about it.
        exit_code: Exit code of the command.
    """

    def __init__(self, message: str, *, hint: str, exit_code: int = ENVIRONMENT) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
