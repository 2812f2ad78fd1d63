"""A handful of faults on a real Slurm; `scripts/chaos.py` does hundreds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import REPOSITORY
from tests.support.slurm_sandbox import SlurmSandbox

pytestmark = [pytest.mark.slurm, pytest.mark.slurm_releases, pytest.mark.distributed, pytest.mark.timeout(1200)]
RUNS = 5


def test_a_few_runs_survive(slurm_sandbox: SlurmSandbox, tmp_path: Path) -> None:
    """Needs Slurm's packages, which the shared sandbox has checked; it starts one of its own."""
    report = tmp_path / "report.json"
    command = [sys.executable, REPOSITORY / "scripts" / "chaos.py", "--quick", "--runs", str(RUNS), "--seed", "7"]
    faults = ("no grace time", "one rank killed", "srun killed", "administrator", "shell killed")
    release = ["--release", slurm_sandbox.release] if slurm_sandbox.release else []
    only = [word for fault in faults for word in ("--only", fault)]
    done = subprocess.run([*command, *release, *only, "--report", report], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"{RUNS} of {RUNS} survived"
    assert len(json.loads(report.read_text())["kinds"]) == RUNS
