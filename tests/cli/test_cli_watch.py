"""The progress bar of a watched run."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from hpjob.cli import watch
from hpjob.core.run_dir import RunDir


def _status(step: int) -> SimpleNamespace:
    record = SimpleNamespace(
        last_step=SimpleNamespace(step=step, loss=5.55871234),
        total_steps=120,
        tokens_per_s=12682.4,
        seconds_left=4009.0,
    )
    return SimpleNamespace(state="running", why="running on 2 nodes", record=record)


def test_bar_speed_and_time_left_fit_an_80_column_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr("rich.console.Console", lambda **_: terminal)
    monkeypatch.setattr(watch, "_updates", lambda _: itertools.chain([_status(56), _status(60)]))
    watch._watch_on_terminal(RunDir(tmp_path / "tiny-001"))
    last = next(line for line in reversed(screen.getvalue().splitlines()) if "tiny-001" in line)
    assert "tiny-001: running" in last
    assert "━━━━━╸" in last
    assert "60/120" in last
    assert "12,682 tokens/s" in last
    assert last.rstrip().endswith("left")
    assert "…" not in last
