"""`hpjob checkpoints` on folders made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpjob.core.run_dir import RunDir
from hpjob.plan.model import ParallelDegrees
from hpjob.recipe.load import dump_recipe, load_recipe
from hpjob.runtime.checkpoint.folder import CheckpointFolder
from hpjob.runtime.checkpoint.manifest import DATA_NAME, Kind, Manifest, describe_file
from tests.cli.conftest import Cli


@pytest.fixture
def run(cli: Cli) -> RunDir:
    """A run with three checkpoints and a leftover."""
    found = RunDir(Path("runs/made").absolute())
    found.path.mkdir(parents=True)
    found.recipe.write_text(dump_recipe(load_recipe("tiny", [])))
    found.script.touch()
    write(found, 10, "permanent")
    write(found, 20, "permanent")
    write(found, 25, "ephemeral")
    (found.checkpoints / "step-00000030.0002.partial" / DATA_NAME).mkdir(parents=True)
    return found


def write(run: RunDir, step: int, kind: Kind) -> None:
    folder = CheckpointFolder(run)
    folder.begin(step)
    shard = folder.partial(step) / DATA_NAME / "__0_0.distcp"
    shard.write_bytes(bytes([step]) * 2048)
    manifest = Manifest(
        step=step,
        kind=kind,
        attempt=0,
        plan="tp 2 · pp 1 · dp 4, zero 1",
        degrees=ParallelDegrees(tp=2, dp=4),
        world_size=8,
        num_samples=8 * step,
        lr=0.1,
        fingerprint={},
        files=(describe_file(shard),),
        hpjob_version="0",
        torch_version="2",
    )
    folder.commit(manifest)


def test_the_list_says_step_kind_size_age_mesh_and_state(cli: Cli, run: RunDir) -> None:
    result = cli("checkpoints", "made")
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0].split() == ["step", "kind", "size", "age", "mesh", "state"]
    assert lines[1].split()[:4] == ["10", "permanent", "2.0", "KiB"] and lines[1].endswith(" complete")
    assert "tp 2 · pp 1 · dp 4, zero 1" in lines[1]
    assert lines[3].split()[:2] == ["25", "ephemeral"]
    assert lines[4].split() == ["30", "?", "?", "?", "?", "incomplete"]
    assert "--verify" in lines[-1]


def test_verify_names_the_damaged_file(cli: Cli, run: RunDir) -> None:
    assert "3 files have the checksums" in cli("checkpoints", "made", "--verify").out
    shard = run.checkpoint(20) / DATA_NAME / "__0_0.distcp"
    shard.write_bytes(b"\0" + shard.read_bytes()[1:])
    assert cli("checkpoints", "made").code == 0
    result = cli("checkpoints", "made", "--verify")
    assert result.code == 3
    assert f"{shard} has another checksum than the manifest" in result.out
    document = json.loads(cli("checkpoints", "made", "--verify", "--json").out)
    assert [entry["state"] for entry in document["checkpoints"]] == ["complete", "damaged", "complete", "incomplete"]
    assert document["checkpoints"][1]["problems"] == ["data/__0_0.distcp has another checksum than the manifest"]


def test_a_damaged_manifest_is_seen_without_verify(cli: Cli, run: RunDir) -> None:
    manifest = run.checkpoint(20) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"lr": 0.1', '"lr": 0.2'))
    result = cli("checkpoints", "made")
    assert result.code == 3
    assert "manifest.json: its checksum is another than SHA256SUMS says" in result.out


def test_no_checkpoints_is_said(cli: Cli, run: RunDir) -> None:
    run.checkpoints.rename(run.path / "elsewhere")
    assert cli("checkpoints", "made").out == "made has no checkpoints yet\n"
