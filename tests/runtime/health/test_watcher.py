"""The watcher's threads: a look that fails, a store that never answers, a folder that stalls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import read_failures
from hpjob.runtime import watcher as watcher_module
from hpjob.runtime.failures import FailureReporter
from hpjob.runtime.rank import Rank
from hpjob.runtime.watcher import PeerWatcher

PATIENCE_S = 240.0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_INTERVAL_S", 0.01), ("_GRACE_S", 0.01), ("_STORE_SILENCE_S", 600.0), ("_JOIN_S", 30.0)):
        monkeypatch.setattr(watcher_module, name, value)


@pytest.fixture
def make(tmp_path: Path, quick: None) -> Iterator[Callable[[int], tuple[PeerWatcher, list[str], threading.Event]]]:
    made: list[PeerWatcher] = []
    over = threading.Event()

    def watcher(rank: int) -> tuple[PeerWatcher, list[str], threading.Event]:
        own = Rank(
            rank=rank,
            local_rank=0,
            hosts=("n1", "n2"),
            node=f"n{rank + 1}",
            master_addr="127.0.0.1",
            run_dir=RunDir(tmp_path),
            attempt=AttemptDir(tmp_path),
        )
        reporter = FailureReporter(own)
        left: list[str] = []
        gone = threading.Event()

        def leave(why: str) -> Any:
            left.append(why)
            gone.set()
            over.wait()  # os._exit would end the process here

        reporter.leave_for_peer = leave  # type: ignore[method-assign]
        made.append(PeerWatcher(reporter))
        made[-1].start()
        return made[-1], left, gone

    yield watcher
    for one in made:
        one._stopped.set()
    over.set()
    for one in made:
        one.stop()


def test_a_store_that_never_answers_is_missed(
    make: Callable[[int], tuple[PeerWatcher, list[str], threading.Event]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watcher_module, "_STORE_SILENCE_S", 0.1)
    watcher, left, gone = make(1)
    for_ever = threading.Event()
    watcher.add(lambda: None, lambda: for_ever.wait() and None)
    assert gone.wait(PATIENCE_S)
    for_ever.set()
    assert "rank 0 on n1 shows no sign of life" in left[0]
    (failure,) = read_failures(AttemptDir(tmp_path))
    assert (failure.rank, failure.node, failure.kind, failure.reported_by) == (0, "n1", "hang", 1)


def test_a_look_that_fails_is_not_the_last_one(
    make: Callable[[int], tuple[PeerWatcher, list[str], threading.Event]],
) -> None:
    watcher, left, gone = make(1)
    looks = iter(range(1000))

    def probe() -> str | None:
        if next(looks) < 3:
            raise TypeError("a line number of None")
        return "rank 0 failed"

    watcher.add(probe)
    assert gone.wait(PATIENCE_S)
    assert left == ["rank 0 failed"]


def test_a_folder_that_stalls_does_not_stop_the_looks_at_the_store(
    make: Callable[[int], tuple[PeerWatcher, list[str], threading.Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled, for_ever, looked = threading.Event(), threading.Event(), threading.Event()

    def stall(attempt: AttemptDir) -> Any:
        stalled.set()
        for_ever.wait()
        return []

    monkeypatch.setattr(watcher_module, "read_failures", stall)
    watcher, left, _ = make(0)
    assert stalled.wait(PATIENCE_S)
    watcher.add(looked.set)
    assert looked.wait(PATIENCE_S)
    for_ever.set()
    assert left == []
