"""Calls of Slurm's commands: bounded in time, read in the C locale, free of a person's display settings."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_DISPLAY_PREFIXES = ("SQUEUE_", "SINFO_", "SACCT_", "SCONTROL_", "SACCTMGR_")
_DISPLAY_NAMES = ("SLURM_TIME_FORMAT", "SLURM_TOPO_LEN", "SLURM_BITSTR_LEN")

NOT_FOUND = 127
TIMED_OUT = 124


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
