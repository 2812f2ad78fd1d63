"""The progress bar of a watched run."""

from __future__ import annotations

import io
import itertools
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from hpjob.cli import watch
from hpjob.core.run_dir import RunDir
from hpjob.slurm.live import Submission, record_submission


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


@pytest.mark.parametrize(("host", "said"), [("another-host", True), (socket.gethostname(), False)])
def test_what_cannot_be_seen_of_a_run_on_another_host_is_said(
    host: str, said: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "tiny-001")
    run.path.mkdir()
    record_submission(
        run, Submission(job_id="7", executor="local", submitted_at=0.0, host=host, process_created_at=0.0)
    )
    monkeypatch.setattr(watch, "_updates", lambda _: iter([_status(60)]))
    watch.watch_run(run)
    text = capsys.readouterr().err
    assert ("runs without Slurm on another-host" in text and "whether its processes still live" in text) == said
