"""Which checkpoint a restart takes: verified ones only, of the same training, from any layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.run_folder import Run, small_recipe, write_tokens

# One worker makes the finished run for all of them.
pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("resume checks")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Steps 1 to 6 on two ranks, with checkpoints of steps 2, 4, 6."""
    root = tmp_path_factory.mktemp("resume")
    recipe = small_recipe(
        write_tokens(root / "data"), training={"steps": 6}, checkpoint={"every_steps": 2, "keep_last": 3}
    )
    run = Run.create(root / "run", recipe)
    assert run.start(tp=2).wait() == [0, 0]
    assert run.checkpoint_names() == ["step-00000002", "step-00000004", "step-00000006"]
    return run


def stopped_at_4(finished: Run, path: Path) -> Run:
    """Return a copy of the run that was stopped after step 4."""
    shutil.copytree(finished.dir.path, path)
    run = Run(type(finished.dir)(path), finished.recipe)
    run.dir.finished.unlink()
    shutil.rmtree(run.dir.checkpoint(6))
    return run


def resumed_step(run: Run, **degrees: int) -> int | None:
    attempt = run.start(**degrees)
    assert not any(attempt.wait()), attempt.log()
    return next((event["step"] for event in attempt.events() if event["event"] == "resumed"), None)


def flip_a_byte(folder: Path) -> None:
    shard = folder / "data" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def cut_a_shard(folder: Path) -> None:
    shard = folder / "data" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])


def delete_a_shard(folder: Path) -> None:
    (folder / "data" / "__1_0.distcp").unlink()


def tear_the_manifest(folder: Path) -> None:
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text()[:200])


def delete_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def test_layout_of_the_restart_is_free_and_the_same_layout_gives_the_same_bits(finished: Run, tmp_path: Path) -> None:
    same = stopped_at_4(finished, tmp_path / "same")
    assert resumed_step(same, tp=2) == 4
    assert same.losses() == finished.losses()

    for name, degrees in {"pp": {"pp": 2}, "one": {}, "four": {"tp": 2, "dp": 2}}.items():
        other = stopped_at_4(finished, tmp_path / name)
        assert resumed_step(other, **degrees) == 4
        assert other.losses()[:4] == finished.losses()[:4]
        assert dict(other.losses()[4:]) == pytest.approx(dict(finished.losses()[4:]), rel=1e-5)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_a_byte, "__1_0.distcp has another checksum"),
        (cut_a_shard, "__0_0.distcp has"),
        (delete_a_shard, "__1_0.distcp: No such file"),
        (tear_the_manifest, "manifest.json"),
        (delete_the_manifest, "manifest.json"),
    ],
)
def test_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(
    finished: Run, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    run = stopped_at_4(finished, tmp_path / "run")
    damage(run.dir.checkpoint(4))
    attempt = run.start(tp=2)
    assert attempt.wait() == [0, 0], attempt.log()
    events = {event["event"]: event for event in attempt.events()}
    assert events["checkpoint-damaged"]["step"] == 4
    assert reason in events["checkpoint-damaged"]["reason"]
    assert "checkpoint of step 4 is damaged" in attempt.log()
    assert events["resumed"]["step"] == 2
    assert run.losses() == finished.losses()
    assert run.checkpoint_names() == ["step-00000002", "step-00000004", "step-00000006"]


def test_all_checkpoints_damaged_means_from_the_beginning(finished: Run, tmp_path: Path) -> None:
    run = stopped_at_4(finished, tmp_path / "run")
    for step in (2, 4):
        flip_a_byte(run.dir.checkpoint(step))
    assert resumed_step(run, tp=2) is None
    assert run.losses() == finished.losses()


def test_checkpoint_of_another_training_is_refused(finished: Run, tmp_path: Path) -> None:
    run = stopped_at_4(finished, tmp_path / "run")
    document = yaml.safe_load(run.dir.recipe.read_text())
    document["optimizer"]["lr"] = 0.5
    document["training"]["seed"] = 43
    run.dir.recipe.write_text(yaml.safe_dump(document))
    attempt = run.start(tp=2)
    assert attempt.wait() == [2, 2]
    message = attempt.failures()[0]["message"]
    assert "optimizer.lr is 0.5, the checkpoint has 0.001" in message
    assert "training.seed is 43, the checkpoint has 42" in message
    assert run.checkpoint_names() == ["step-00000002", "step-00000004"]


def test_more_steps_may_be_asked_for(finished: Run, tmp_path: Path) -> None:
    run = stopped_at_4(finished, tmp_path / "run")
    document = yaml.safe_load(run.dir.recipe.read_text())
    document["training"]["steps"] = 7
    run.dir.recipe.write_text(yaml.safe_dump(document))
    assert resumed_step(run, tp=2) == 4
    assert [step for step, _ in run.losses()] == [1, 2, 3, 4, 5, 6, 7]


def test_crash_between_last_checkpoint_and_finished_only_writes_finished(finished: Run, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(finished.dir.path, path)
    run = Run(type(finished.dir)(path), finished.recipe)
    run.dir.finished.unlink()
    before = run.dir.metrics.read_bytes()
    assert resumed_step(run, tp=2) == 6
    assert json.loads(run.dir.finished.read_text())["step"] == 6
    assert run.dir.metrics.read_bytes() == before
