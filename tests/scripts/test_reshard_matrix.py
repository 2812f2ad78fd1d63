"""State goes from mesh to mesh; `scripts/reshard_matrix.py` without options is the long form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the runtime's tests need the [train] extra")
SCRIPT = Path(__file__).parents[2] / "scripts" / "reshard_matrix.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--covering", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_rank_gets_its_part_of_the_unsharded_state() -> None:
    result = run()
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "10 of 10 pairs within 1e-06 of the unsharded state"


def test_a_spoiled_element_is_seen() -> None:
    result = run("--broken", "--model", "llama")
    assert result.returncode == 1, result.stderr
    assert result.stdout.splitlines()[-1].startswith("0 of 2 pairs")
