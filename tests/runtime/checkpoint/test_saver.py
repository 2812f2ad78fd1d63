"""Saves beside the training, in one process: what is saved, what is said, what stays when saving fails."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpjob.runtime.checkpoint import folder as folder_module
from hpjob.runtime.checkpoint import save as save_module
from hpjob.runtime.checkpoint import saver as saver_module
from hpjob.runtime.checkpoint import write as write_module
from hpjob.runtime.checkpoint.listing import list_checkpoints
from tests.runtime.checkpoint.conftest import OneRank, flip_byte

pytestmark = pytest.mark.usefixtures("one_rank")
WAIT_S = 240


class Gate:
    """Holds a save before its first byte until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open, self._reached = threading.Event(), threading.Event()
        original = save_module.write_shards

        def write_shards(*args: Any) -> Any:
            self._reached.set()
            assert self._open.wait(WAIT_S)
            return original(*args)

        monkeypatch.setattr(save_module, "write_shards", write_shards)

    def wait_until_reached(self) -> None:
        assert self._reached.wait(WAIT_S)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open()


def test_training_goes_on_and_the_checkpoint_holds_the_step_it_began_at(tmp_path: Path, gate: Gate) -> None:
    rank = OneRank(tmp_path, every_steps=2)
    rank.train(1, 2, 3)
    assert rank.keeper.running and rank.keeper.saved_step == 0
    gate.wait_until_reached()
    assert rank.names() == ["step-00000002.0000.partial"]
    gate.open()
    rank.leave(3)
    assert rank.names() == ["step-00000002", "step-00000003"]
    saved = rank.events("checkpoint-saved")
    assert [(event["step"], event["kind"]) for event in saved] == [(2, "permanent"), (3, "ephemeral")]
    assert all(event["stall_s"] > 0 for event in saved)
    (waited,) = rank.events("checkpoint-waited")
    assert (waited["running"], waited["step"]) == (2, 3)
    shutil.rmtree(rank.folder.complete(3))
    assert rank.resume() == 2


def test_without_copies_the_checkpoint_would_hold_a_later_step(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    monkeypatch.setattr(saver_module.Staging, "copy", lambda self, tensors: tensors)
    rank = OneRank(tmp_path, every_steps=2)
    rank.train(1, 2, 3)
    gate.open()
    rank.keeper.collect()
    with pytest.raises(AssertionError):
        rank.resume()


def test_a_save_that_is_due_while_one_runs_is_skipped_or_waits(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = OneRank(tmp_path, every_steps=4, ephemeral_every_steps=1)
    rank.train(1, 2, 3)
    assert [event["step"] for event in rank.events("checkpoint-skipped")] == [2, 3]
    collect = rank.saver.collect

    def open_and_collect() -> Any:
        gate.open()
        return collect()

    monkeypatch.setattr(rank.saver, "collect", open_and_collect)
    rank.train(4)
    (waited,) = rank.events("checkpoint-waited")
    assert (waited["running"], waited["step"]) == (1, 4)
    rank.leave(4, last=True)
    assert rank.names() == ["step-00000004"]


def test_synchronous_saves_are_complete_when_training_goes_on(tmp_path: Path) -> None:
    rank = OneRank(tmp_path, every_steps=2, asynchronous=False)
    rank.train(1, 2)
    assert rank.keeper.saved_step == 2 and not rank.keeper.running
    assert rank.saver.staged_bytes == 0
    (saved,) = rank.events("checkpoint-saved")
    assert saved["stall_s"] >= saved["duration_s"]


def test_a_save_that_is_over_before_anyone_waits_for_it_stalled_training_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread of a busy machine may stand still right after it has begun a save."""
    rank = OneRank(tmp_path, every_steps=2, asynchronous=False)
    start = rank.saver.start

    def start_and_dawdle(*args: Any, **kwargs: Any) -> float:
        stall_s = start(*args, **kwargs)
        assert rank.saver._save is not None
        rank.saver._save._thread.join()
        return stall_s

    monkeypatch.setattr(rank.saver, "start", start_and_dawdle)
    rank.train(1, 2)
    (saved,) = rank.events("checkpoint-saved")
    assert saved["stall_s"] >= saved["duration_s"]


def test_no_memory_for_copies_means_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "missing_bytes", lambda needed, ranks: needed)
    rank = OneRank(tmp_path, every_steps=1)
    rank.train(1, 2)
    assert rank.keeper.saved_step == 2 and not rank.keeper.running
    (memory,) = rank.events("checkpoint-memory")
    assert memory["missing_bytes"] == 3 * 3000 * 4 + 8 + 8 + rank_state_bytes()
    assert rank.resume() == 2


def rank_state_bytes() -> int:
    import torch

    return torch.get_rng_state().nbytes


def test_ephemeral_ones_go_with_the_next_and_round_steps_stay(tmp_path: Path) -> None:
    rank = OneRank(
        tmp_path, every_steps=4, ephemeral_every_steps=1, keep_last=1, keep_every_steps=8, asynchronous=False
    )
    seen = []
    for step in range(1, 14):
        rank.train(step)
        seen.append([int(name.removeprefix("step-")) for name in rank.names()])
    assert seen[:6] == [[1], [2], [3], [4], [4, 5], [4, 6]]
    assert seen[-1] == [8, 12, 13]
    kinds = {entry.step: entry.manifest.kind for entry in list_checkpoints(rank.run) if entry.manifest}
    assert kinds == {8: "permanent", 12: "permanent", 13: "ephemeral"}


def test_what_reads_back_differently_is_set_aside_and_the_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = OneRank(tmp_path, every_steps=1, keep_last=1, asynchronous=False)
    rank.train(1)
    original = write_module.write_shards

    def with_a_flipped_byte(data: Path, *rest: Any) -> Any:
        written = original(data, *rest)
        flip_byte(data / written.files[0].name, 500)
        return written

    with monkeypatch.context() as patch:
        patch.setattr(save_module, "write_shards", with_a_flipped_byte)
        rank.train(2)
    assert rank.names() == ["step-00000001", "step-00000002.damaged"]
    assert "another checksum" in rank.events("checkpoint-failed")[0]["reason"]
    rank.train(3)
    assert rank.names() == ["step-00000003"]


FILES = ["manifest.json", "SHA256SUMS", "data/.metadata", "data/__0_0.distcp"]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_in_any_file_is_found(tmp_path: Path, name: str) -> None:
    rank = OneRank(tmp_path, every_steps=1, asynchronous=False)
    rank.train(1, 2)
    folder = rank.folder.complete(2)
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == sorted(FILES)
    size = (folder / name).stat().st_size
    whole = (folder / name).read_bytes()
    for position in {0, 1, size // 3, size // 2, size - 2, size - 1}:
        flip_byte(folder / name, position)
        first, second = list_checkpoints(rank.run, verify=True)
        assert (first.state, second.state) == ("complete", "damaged"), position
        assert name.removeprefix("data/") in second.problems[0] or "SHA256SUMS" in second.problems[0]
        (folder / name).write_bytes(whole)
    assert [entry.state for entry in list_checkpoints(rank.run, verify=True)] == ["complete", "complete"]
    flip_byte(folder / name, size // 2)
    assert rank.resume() == 1
    assert rank.damage[0].startswith("2: ")


def test_a_checkpoint_of_an_earlier_version_has_no_sums_and_loads(tmp_path: Path) -> None:
    rank = OneRank(tmp_path, every_steps=1, asynchronous=False)
    rank.train(1)
    folder = rank.folder.complete(1)
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(FileNotFoundError):
        rank.folder.read(1)
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 1'))
    assert rank.resume() == 1


def test_sha256sum_checks_a_checkpoint(tmp_path: Path) -> None:
    rank = OneRank(tmp_path, every_steps=1, asynchronous=False)
    rank.train(1)
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    checked = subprocess.run(command, cwd=rank.folder.complete(1), capture_output=True, text=True, check=False)
    assert checked.returncode == 0 and checked.stdout.count("OK") == 3


def failing(module: Any, name: str, code: int, *, when: Callable[..., bool] = lambda *_: True) -> Any:
    """Return a fault: a function of a module that fails with an error of the operating system."""

    def install(patch: pytest.MonkeyPatch, rank: OneRank) -> None:
        original = getattr(module, name)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            if when(*args):
                raise OSError(code, os.strerror(code))
            return original(*args, **kwargs)

        patch.setattr(module, name, replacement)

    return install


def in_partial(path: Any, *_: Any) -> bool:
    return ".partial" in str(path)


def lose_the_folder(patch: pytest.MonkeyPatch, rank: OneRank) -> None:
    original = save_module.write_shards

    def write_shards(*args: Any) -> Any:
        rank.folder.path.rename(rank.folder.path.with_name("moved away"))
        return original(*args)

    patch.setattr(save_module, "write_shards", write_shards)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (failing(write_module._HashingStream, "write", errno.ENOSPC), "No space left on device"),
        (failing(write_module._HashingStream, "write", errno.EDQUOT), "Disk quota exceeded"),
        (failing(write_module.os, "fsync", errno.EIO), "Input/output error"),
        (failing(Path, "mkdir", errno.EROFS, when=in_partial), "Read-only file system"),
        (failing(Path, "rename", errno.EDQUOT, when=in_partial), "Disk quota exceeded"),
        (failing(folder_module, "_write_durably", errno.ENOSPC), "No space left on device"),
        (failing(folder_module, "sync_folder", errno.EIO, when=lambda p: p.name == "checkpoints"), "Input/output"),
        (lose_the_folder, "No such file or directory"),
    ],
)
def test_a_save_that_fails_is_said_and_the_next_one_comes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, reason: str, asynchronous: bool
) -> None:
    rank = OneRank(tmp_path, every_steps=1, keep_last=2, asynchronous=asynchronous)
    rank.train(1)
    rank.keeper.collect()
    with monkeypatch.context() as patch:
        fault(patch, rank)
        rank.train(2)
        rank.keeper.collect()
    (failed,) = rank.events("checkpoint-failed")
    assert (failed["step"], failed["newest_checkpoint"]) == (2, 1)
    assert reason in failed["reason"]
    if fault is not lose_the_folder:
        assert rank.names() == ["step-00000001"]
    rank.train(3)
    rank.leave(3)
    assert rank.names()[-1] == "step-00000003" and len(rank.events("checkpoint-failed")) == 1
    assert rank.resume() == 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no permission to mount a small file system")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_disk_that_is_really_full(small_disk: Path) -> None:
    rank = OneRank(small_disk, every_steps=1, keep_last=1)
    rank.train(1)
    rank.leave(1)
    (small_disk / "other").write_bytes(b"x" * 100_000)
    rank.train(2)
    rank.leave(2)
    failed = rank.events("checkpoint-failed")
    assert failed and all("No space left" in event["reason"] and "MiB were free" in event["reason"] for event in failed)
    (small_disk / "other").unlink()
    rank.train(3)
    rank.leave(3, last=True)
    assert rank.names() == ["step-00000003"] and rank.resume() == 3
