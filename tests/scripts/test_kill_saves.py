"""A process that is killed while it saves; `scripts/kill_saves.py --kills 300` is the long form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the runtime's tests need the [train] extra")
SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_saves.py"


def test_kills_over_a_whole_save(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--kills", "10", "--size-mib", "1", "--folder", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "10 of 10 kills survived"
    assert not list(tmp_path.iterdir())
