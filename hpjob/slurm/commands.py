"""Calls of Slurm's commands: bounded in time, read in the C locale, free of a person's display settings."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_DISPLAY_PREFIXES = ("SQUEUE_", "SINFO_", "SACCT_", "SCONTROL_", "SACCTMGR_")
_DISPLAY_NAMES = ("SLURM_TIME_FORMAT", "SLURM_TOPO_LEN", "SLURM_BITSTR_LEN")

NOT_FOUND = 127
TIMED_OUT = 124

# A controller that is restarted, or fails over to its backup, is away for seconds to minutes.
CONTROLLER_PATIENCE_S = 300.0
_RETRY_S = 2.0
_UNREACHABLE = (
    "unable to contact",
    "connect failure",
    "connection refused",
    "timed out",
    "zero bytes",
    "standby mode",
    "communication connection failure",
)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.returncode == 0

    @property
    def complaint(self) -> str:
        """The command's own words on one line."""
        lines = [line.strip() for line in (self.stderr or self.stdout).splitlines() if line.strip()]
        return "; ".join(lines) or f"exit code {self.returncode}"


def run_command(
    arguments: Sequence[str], *, timeout_s: float = 20.0, environment: Mapping[str, str] | None = None
) -> CommandResult:
    """Run a command to its end.

    Never raises for what the command does: a missing program gives code 127, one that outlives
    ``timeout_s`` is killed and gives 124.
    """
    env = dict(environment) if environment is not None else query_environment(os.environ)
    try:
        done = subprocess.run(
            list(arguments),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=env,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except FileNotFoundError:
        return CommandResult(NOT_FOUND, "", f"{arguments[0]}: command not found")
    except PermissionError as error:
        return CommandResult(NOT_FOUND, "", f"{arguments[0]}: {error.strerror}")
    except subprocess.TimeoutExpired:
        return CommandResult(TIMED_OUT, "", f"{arguments[0]} gave no answer within {timeout_s:g} s")
    return CommandResult(done.returncode, done.stdout, done.stderr)


def is_unreachable(result: CommandResult) -> bool:
    """Return whether the controller did not answer, as opposed to answering no."""
    if result.ok:
        return False
    words = f"{result.stdout}\n{result.stderr}".lower()
    return result.returncode == TIMED_OUT or any(phrase in words for phrase in _UNREACHABLE)


def run_patiently(
    arguments: Sequence[str],
    *,
    patience_s: float = CONTROLLER_PATIENCE_S,
    environment: Mapping[str, str] | None = None,
) -> CommandResult:
    """Run a command again and again while the controller does not answer, for at most ``patience_s``."""
    end = time.monotonic() + patience_s
    while True:
        result = run_command(arguments, environment=environment)
        if not is_unreachable(result) or time.monotonic() > end:
            return result
        time.sleep(_RETRY_S)


def query_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` without what would change the form of Slurm's answers."""
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith(_DISPLAY_PREFIXES) and name not in _DISPLAY_NAMES
    }
    return kept | {"LC_ALL": "C"}


def key_values(line: str) -> dict[str, str]:
    """Read a line of ``scontrol … -o``: ``Key=value`` pieces; a piece without ``=`` belongs to the value before."""
    found: dict[str, str] = {}
    last = ""
    for piece in line.split():
        name, equals, value = piece.partition("=")
        if equals and name[:1].isalpha():
            found[name] = value
            last = name
        elif last:
            found[last] += f" {piece}"
    return found
