"""A save that is cut off or fails never harms the checkpoint before it, nor the numbers after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faults import before_step, fail_save, kill_in_save, terminate_self
from tests.support.run_folder import Run, small_recipe, write_tokens

# One worker makes the undisturbed run for all of them.
pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("interrupted saves")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("made") / "data")


def make_run(path: Path, data: Path) -> Run:
    recipe = small_recipe(
        data,
        model={"num_hidden_layers": 2, "hidden_size": 32},
        training={"steps": 6},
        checkpoint={"every_steps": 2, "keep_last": 1},
    )
    return Run.create(path, recipe)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Run:
    run = make_run(tmp_path_factory.mktemp("runs") / "undisturbed", data)
    assert run.start(dp=2).wait() == [0, 0]
    return run


@pytest.mark.parametrize(
    ("moment", "rank", "resumed_from"),
    [
        ("half written", 0, 2),
        ("half written", 1, 2),
        ("written", 0, 2),
        ("manifest written", 0, 2),
        ("before rename", 0, 2),
        ("after rename", 0, 4),
        ("old one renamed", 0, 4),
    ],
)
def test_kill_in_a_save_leaves_a_checkpoint_to_resume_from(
    tmp_path: Path, data: Path, undisturbed: Run, moment: str, rank: int, resumed_from: int
) -> None:
    run = make_run(tmp_path / "run", data)
    codes = run.start(dp=2, fault=kill_in_save(moment, rank=rank, step=4)).wait()
    assert codes[rank] == -9
    assert codes[1 - rank] != 0

    attempt = run.start(dp=2)
    assert attempt.wait() == [0, 0], attempt.log()
    assert next(e["step"] for e in attempt.events() if e["event"] == "resumed") == resumed_from
    assert run.losses() == undisturbed.losses()
    assert run.checkpoint_names() == ["step-00000006"]


def test_full_disk_ends_neither_training_nor_the_old_checkpoint(tmp_path: Path, data: Path, undisturbed: Run) -> None:
    run = make_run(tmp_path / "run", data)
    attempt = run.start(dp=2, fault=fail_save(4, rank=1))
    assert attempt.wait() == [0, 0], attempt.log()
    failed = next(event for event in attempt.events() if event["event"] == "checkpoint-failed")
    assert failed["step"] == 4
    assert failed["newest_checkpoint"] == 2
    assert "File too large" in failed["reason"]
    assert "rank 1" in failed["reason"]
    assert "could not be saved" in attempt.log()
    assert run.losses() == undisturbed.losses()


def test_full_disk_while_being_preempted_is_said_in_the_outcome(tmp_path: Path, data: Path, undisturbed: Run) -> None:
    run = make_run(tmp_path / "run", data)
    attempt = run.start(dp=2, fault=both)
    assert attempt.wait() == [0, 0], attempt.log()
    outcome = attempt.outcome()
    assert (outcome["kind"], outcome["step"]) == ("preempted", 2)
    assert "SIGTERM" in outcome["reason"]
    assert "the newest checkpoint is step 2" in outcome["reason"]
    assert run.checkpoint_names() == ["step-00000002"]
    assert run.start(dp=2).wait() == [0, 0]
    assert run.losses() == undisturbed.losses()


def both(rank: int) -> None:
    fail_save(3, rank=0)(rank)
    before_step(terminate_self, rank=1, step=3)(rank)


def test_last_checkpoint_that_cannot_be_saved_is_a_failure(tmp_path: Path, data: Path) -> None:
    run = make_run(tmp_path / "run", data)
    attempt = run.start(dp=2, fault=fail_save(6, rank=0))
    assert all(attempt.wait())
    assert not run.dir.finished.exists()
    assert attempt.outcome()["kind"] == "failed"
    assert "newest checkpoint is step 4" in attempt.outcome()["reason"]
    assert run.checkpoint_names() == ["step-00000004"]
