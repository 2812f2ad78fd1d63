"""What a failing rank leaves: written by one thread alone, never over the words of who knew more."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import read_failures, read_outcome, write_json
from hpjob.runtime import failures as failures_module
from hpjob.runtime.failures import FailureReporter, PeerLostError
from hpjob.runtime.rank import Rank

PATIENCE_S = 240.0


class Left(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def reporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FailureReporter:
    """Rank 0 of two."""

    def leave(code: int) -> NoReturn:
        raise Left

    monkeypatch.setattr(failures_module, "leave_process", leave)
    run = RunDir(tmp_path)
    attempt = run.attempt(0)
    attempt.path.mkdir(parents=True)
    return FailureReporter(
        Rank(
            rank=0,
            local_rank=0,
            hosts=("n1", "n2"),
            node="n1",
            master_addr="127.0.0.1",
            run_dir=run,
            attempt=attempt,
        )
    )


def outcome_step(attempt: AttemptDir) -> int:
    outcome = read_outcome(attempt)
    assert outcome is not None and outcome.kind == "failed"
    return outcome.step


@pytest.mark.parametrize("known", [0, 2, 6])
def test_the_outcome_names_the_checkpoint_that_a_background_save_has_just_made(
    reporter: FailureReporter, known: int
) -> None:
    """Training hears of it only at the next step boundary, which a failing rank never reaches."""
    for step in (2, 4):
        folder = reporter.rank.run_dir.checkpoint(step)
        folder.mkdir(parents=True)
        write_json(folder / "manifest.json", {"step": step})
    (reporter.rank.run_dir.checkpoints / "step-00000008.0000.partial").mkdir()
    reporter.note_checkpoint(known)
    with pytest.raises(Left):
        reporter.leave(ValueError("a made-up fault"))
    assert outcome_step(reporter.rank.attempt) == max(known, 4)


def test_a_watcher_does_not_end_the_process_while_the_main_thread_says_why(
    reporter: FailureReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk lets the watcher's patience end in the middle of the report."""
    ended: list[str] = []
    original = failures_module.write_json
    watcher = threading.Thread(target=lambda: lose_peer(reporter, ended), daemon=True)

    def write(path: Path, document: Any) -> None:
        if not watcher.ident:
            watcher.start()
            watcher.join(0.2)
        original(path, document)

    monkeypatch.setattr(failures_module, "write_json", write)
    monkeypatch.setattr(failures_module, "_OTHER_REPORT_S", PATIENCE_S)
    with pytest.raises(Left):
        reporter.leave(ValueError("a made-up fault"))
    assert ended == []
    (failure,) = read_failures(reporter.rank.attempt)
    assert (failure.kind, failure.message) == ("exception", "a made-up fault")
    reporter._reporting.release()
    watcher.join(PATIENCE_S)
    assert ended == ["left"]  # the control: nothing else had held it up


def lose_peer(reporter: FailureReporter, ended: list[str]) -> None:
    with pytest.raises(Left):
        reporter.leave_for_peer("rank 1 went away")
    ended.append("left")


def test_who_waits_for_a_report_that_never_ends_leaves_all_the_same(
    reporter: FailureReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures_module, "_OTHER_REPORT_S", 0.01)
    reporter._reporting.acquire()
    with pytest.raises(Left):
        reporter.leave_for_peer("rank 1 went away")
    assert read_failures(reporter.rank.attempt) == []


def test_a_record_that_comes_meanwhile_is_not_replaced_by_one_that_knows_less(
    reporter: FailureReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank says that this one hangs while it notices only that it lost the others."""
    path = reporter.rank.attempt.failure(0)
    own = {"rank": 0, "node": "n1", "time": 1.0, "kind": "hang", "message": "own words", "traceback": "stack"}
    original = failures_module.write_json_once

    def others_are_faster(target: Path, document: Any) -> None:
        write_json(path, own)
        original(target, document)

    monkeypatch.setattr(failures_module, "write_json_once", others_are_faster)
    with pytest.raises(Left):
        reporter.leave(PeerLostError("rank 1 went away", hint="look"))
    reporter.report_for(0, kind="hang", message="another's words", stacks=None, step=3)
    assert [failure.message for failure in read_failures(reporter.rank.attempt)] == ["own words"]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_where_links_are_missing_the_record_is_written_all_the_same(
    reporter: FailureReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.link", no_links)
    for words in ("the first", "the second"):
        reporter.report_for(1, kind="hang", message=words, stacks=None, step=3)
    (failure,) = read_failures(reporter.rank.attempt)
    assert (failure.rank, failure.message) == (1, "the first")
    assert len(list(reporter.rank.attempt.failures.iterdir())) == 1
