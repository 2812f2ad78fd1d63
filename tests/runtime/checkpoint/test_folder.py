"""Two attempts of one run in the ``checkpoints`` folder: a frozen process of the older one goes on."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from hpjob.core.run_dir import RunDir
from hpjob.runtime.checkpoint.folder import CheckpointFolder
from hpjob.runtime.checkpoint.listing import list_checkpoints
from hpjob.runtime.checkpoint.manifest import DATA_NAME

STEP = 25


@pytest.fixture
def older(tmp_path: Path) -> CheckpointFolder:
    """What a process of the first attempt still works with."""
    return CheckpointFolder(RunDir(tmp_path), 0)


@pytest.fixture
def newer(tmp_path: Path) -> CheckpointFolder:
    """The attempt that trains the run now, in the middle of a save of the same step."""
    folder = CheckpointFolder(RunDir(tmp_path), 1)
    folder.begin(STEP)
    _shard(folder).write_bytes(b"newer")
    return folder


def _shard(folder: CheckpointFolder) -> Path:
    return folder.partial(STEP) / DATA_NAME / "__0_0.distcp"


def test_a_save_that_is_late_writes_beside_the_one_that_counts(
    older: CheckpointFolder, newer: CheckpointFolder
) -> None:
    older.begin(STEP)
    _shard(older).write_bytes(b"older")
    assert _shard(newer).read_bytes() == b"newer"
    older.abandon(STEP)
    assert _shard(newer).read_bytes() == b"newer"


def test_a_start_that_is_late_deletes_nothing_of_the_one_that_counts(
    older: CheckpointFolder, newer: CheckpointFolder
) -> None:
    assert older.clean_leftovers() == []
    assert _shard(newer).read_bytes() == b"newer"


def test_the_newer_attempt_deletes_what_the_older_one_left(older: CheckpointFolder, newer: CheckpointFolder) -> None:
    older.begin(STEP)
    assert newer.clean_leftovers() == [f"step-{STEP:08d}.0000.partial", f"step-{STEP:08d}.0001.partial"]
    assert list(newer.path.iterdir()) == []


def test_what_somebody_still_writes_does_not_stop_a_start(
    older: CheckpointFolder, newer: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    older.begin(STEP)
    later = CheckpointFolder(RunDir(newer.path.parent), 2)
    kept, real = older.partial(STEP), os.rmdir

    def rmdir(path: Any, **options: Any) -> None:
        if str(path).endswith(kept.name):
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        real(path, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)
    assert later.clean_leftovers() == [f"step-{STEP:08d}.0001.partial"]
    assert kept.name in caplog.text


def test_partial_folders_of_any_attempt_are_listed(older: CheckpointFolder, newer: CheckpointFolder) -> None:
    older.begin(STEP)
    entries = list(list_checkpoints(RunDir(newer.path.parent)))
    assert [(entry.step, entry.state) for entry in entries] == [(STEP, "incomplete")] * 2
