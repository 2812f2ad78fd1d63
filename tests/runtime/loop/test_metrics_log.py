"""``metrics.jsonl``: no step twice, none missing, every digit of a loss."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpjob.runtime.metrics import MetricsLog


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def write(path: Path, count: int, last_step: int = 0) -> None:
    log = MetricsLog(path, last_step)
    for step in range(last_step + 1, last_step + count + 1):
        log.append({"step": step, "loss": 1 / 3})
    log.close()


def test_going_on_from_a_checkpoint_drops_the_steps_after_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 7)
    write(path, 3, last_step=4)
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7]
    write(path, 2, last_step=0)
    assert steps(path) == [1, 2]


@pytest.mark.parametrize(
    "torn", ['{"step": 3, "lo', '{"step": "3rd"}\n', '{"loss": 1}\n', '{"step": 3, "loss": 0.5}', "\0\0\0\0"]
)
def test_torn_last_line_is_dropped(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 2)
    with path.open("a") as stream:
        stream.write(torn)
    write(path, 1, last_step=2)
    assert steps(path) == [1, 2, 3]


def test_floats_come_back_to_the_last_bit(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1)
    assert json.loads(path.read_text())["loss"] == 1 / 3


def test_full_disk_loses_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    log.append({"step": 1})
    real_write = os.write
    room = 5

    def short_write(descriptor: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(28, "No space left on device")
        count = real_write(descriptor, data[:room])
        room -= count
        return count

    monkeypatch.setattr("os.write", short_write)
    log.append({"step": 2})
    log.append({"step": 3})
    with pytest.raises(OSError, match="No space left"):
        log.sync()
    monkeypatch.undo()
    log.append({"step": 4})
    log.close()
    assert steps(path) == [1, 2, 3, 4]
