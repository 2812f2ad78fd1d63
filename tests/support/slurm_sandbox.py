"""Handles a Slurm sandbox from tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PATIENCE_S = 240.0
"""For things that take seconds on a machine with nothing else to do."""
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "slurm-sandbox"


@dataclass(frozen=True)
class SlurmSandbox:
    """One sandbox with its own state folder.

    Attributes:
        path: State folder.
        release: Debian whose Slurm runs; empty = this machine's own.
    """

    path: Path
    release: str = ""

    @property
    def variables(self) -> dict[str, str]:
        """What makes Slurm's commands use this sandbox."""
        conf = {"SLURM_CONF": str(self.path / "slurm.conf")}
        if not self.release:
            return conf
        try:
            programs = json.loads((self.path / "sandbox.json").read_text())["programs"]
        except FileNotFoundError:  # not started
            return conf
        return conf | ({"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"} if programs else {})

    @property
    def env(self) -> dict[str, str]:
        """Environment whose Slurm commands use this sandbox."""
        return {**os.environ, **self.variables}

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let Slurm commands that this process calls use the sandbox."""
        for name, value in self.variables.items():
            monkeypatch.setenv(name, value)

    def run(
        self, *command: str | Path, check: bool = True, timeout: float = 300, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command against this sandbox; with ``check`` a failure shows what it wrote."""
        done = subprocess.run(
            [str(part) for part in command],
            env={**self.env, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check:
            assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def control(self, command: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run ``slurm-sandbox COMMAND`` on this sandbox."""
        own = ("--state-dir", str(self.path), *(("--release", self.release) if self.release else ()))
        # Fetching another release's Slurm takes long on a slow line.
        return self.run(sys.executable, SCRIPT, command, *own, *arguments, check=check, timeout=600)

    def start(self, *options: str) -> None:
        """Run ``slurm-sandbox up``; without Slurm and a way to get it the test is skipped."""
        started = self.control("up", *options, check=False)
        if started.returncode == 0:
            return
        if "is not installed" in started.stderr:
            pytest.skip(f"no Slurm on this machine: {started.stderr.splitlines()[0]}")
        pytest.fail(started.stderr)

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.control("status", "--json", check=False).stdout)
        return document

    def submit(self, *arguments: str | Path) -> str:
        """Run sbatch and return the job id."""
        return self.run("sbatch", "--parsable", *arguments).stdout.strip().partition(";")[0]

    def job(self, job_id: str) -> dict[str, str]:
        """Fields of ``scontrol show job``."""
        text = self.run("scontrol", "show", "job", job_id, "--oneliner").stdout
        pairs = (field.partition("=") for field in text.split())
        return {key: value for key, _, value in pairs}

    def wait_for(self, condition: Callable[[], object], what: str, timeout: float = PATIENCE_S) -> None:
        """Poll until ``condition`` holds; fail after ``timeout`` seconds."""
        wait_for(condition, what, timeout)

    def wait_for_job(self, job_id: str, *states: str, timeout: float = PATIENCE_S) -> None:
        """Wait until a job is in one of these states."""
        self.wait_for(lambda: self.job(job_id)["JobState"] in states, f"job {job_id} in {'/'.join(states)}", timeout)


def wait_for(condition: Callable[[], object], what: str, timeout: float = PATIENCE_S) -> None:
    """Poll until ``condition`` holds; fail after ``timeout`` seconds."""
    until = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < until, f"after {timeout:.0f} s still not: {what}"
        time.sleep(0.05)


def wait_until_nothing_runs(path: Path, *, but: Collection[int] = ()) -> None:
    """Wait for the last process that has to do with a folder: one that has ended may still be closing its files."""
    wait_for(lambda: set(processes_of(path)) <= set(but), f"nothing of {path} runs")
    assert set(processes_of(path)) == set(but)


def processes_of(path: Path) -> dict[int, str]:
    """Running processes that have to do with a folder: named in command line, environment, open files or as cwd."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                continue
            command = (entry / "cmdline").read_bytes()
            texts = [command, (entry / "environ").read_bytes(), os.fsencode((entry / "cwd").readlink())]
            texts += [os.fsencode(link.readlink()) for link in (entry / "fd").iterdir()]
        except OSError:  # ended meanwhile, or another user's
            continue
        if any(os.fsencode(path) in text for text in texts):
            found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found
