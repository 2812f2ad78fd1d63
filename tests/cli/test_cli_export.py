"""`hpjob export`: a checkpoint becomes a folder that transformers loads, or a sentence says why not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="exporting needs the [train] extra")
pytest.importorskip("transformers", reason="exporting needs the [train] extra")

import torch
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoModelForCausalLM

from hpjob.core.run_dir import RunDir
from hpjob.plan.model import ParallelDegrees
from hpjob.recipe.load import dump_recipe
from hpjob.runtime.checkpoint.folder import CheckpointFolder
from hpjob.runtime.checkpoint.manifest import DATA_NAME, Manifest, describe_file
from hpjob.runtime.hugging_face.layout import model_parameters
from hpjob.runtime.model.families import family_of
from tests.cli.conftest import Cli
from tests.support.run_folder import small_recipe


def _checkpoint(folder: CheckpointFolder, step: int, weights: dict[str, torch.Tensor]) -> None:
    folder.begin(step)
    data = folder.partial(step) / DATA_NAME
    save(weights, checkpoint_id=data, no_dist=True)
    manifest = Manifest(
        step=step,
        attempt=0,
        plan="tp 1",
        degrees=ParallelDegrees(),
        world_size=1,
        num_samples=0,
        lr=0.0,
        fingerprint={},
        files=tuple(describe_file(path) for path in data.iterdir()),
        hpjob_version="0",
        torch_version="0",
    )
    folder.commit(manifest)


@pytest.fixture
def run(cli: Cli) -> RunDir:
    """Checkpoints of steps 10 and 20, all weights of which are 0.1 and 0.2."""
    recipe = small_recipe(
        Path("corpus").absolute(), model={"vocab_size": 1024, "hidden_size": 128, "tie_word_embeddings": True}
    )
    found = RunDir(Path("runs/small").absolute())
    found.path.mkdir(parents=True)
    found.recipe.write_text(dump_recipe(recipe))
    found.script.write_text("")
    (Path("corpus") / "tokenizer.json").write_text("{}")
    folder = CheckpointFolder(found)
    shapes = model_parameters(family_of("llama"), recipe.model)
    with pytest.warns(UserWarning, match="distributed"):
        for step in (10, 20):
            _checkpoint(folder, step, {name: torch.full(shape, step / 100) for name, shape in shapes.items()})
    return found


def test_the_newest_checkpoint_loads_with_transformers(cli: Cli, run: RunDir) -> None:
    result = cli("export", "small", "--to", "out", "--max-shard-gb", "0.001", "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert (document["step"], document["dtype"]) == (20, "fp32")
    model = AutoModelForCausalLM.from_pretrained("out")
    assert all(torch.equal(p.detach(), torch.full_like(p, 0.2)) for p in model.parameters())
    assert model.config.eos_token_id == 0
    assert len(list(Path("out").glob("*.safetensors"))) > 1
    assert (Path("out") / "tokenizer.json").read_text() == "{}"


def test_an_older_step_and_another_type(cli: Cli, run: RunDir) -> None:
    assert cli("export", "small", "--to", "out", "--step", "10", "--dtype", "bf16").code == 0
    config = json.loads(Path("out/config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["architectures"] == ["LlamaForCausalLM"]
    model = AutoModelForCausalLM.from_pretrained("out", dtype="auto")
    assert model.dtype is torch.bfloat16
    assert float(model.lm_head.weight.detach().max()) == pytest.approx(0.1, rel=1e-2)


def test_what_cannot_be_exported_is_said(cli: Cli, run: RunDir) -> None:
    assert "there are 20, 10" in cli("export", "small", "--to", "out", "--step", "15").err
    assert "unknown dtype 'fp8'" in cli("export", "small", "--to", "out", "--dtype", "fp8").err
    taken = cli("export", "small", "--to", "corpus")
    assert (taken.code, "exists already" in taken.err) == (2, True)
    file = next(path for path in (run.checkpoint(20) / DATA_NAME).iterdir() if path.name.startswith("__"))
    file.write_bytes(file.read_bytes()[:-1])
    damaged = cli("export", "small", "--to", "out")
    assert damaged.code == 3
    assert "the checkpoint of step 20 is damaged" in damaged.err
    assert "--step 10" in damaged.err
    assert not Path("out").exists()


def test_without_torch_the_extra_is_named(cli: Cli, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hpjob.runtime.hugging_face.export", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    result = cli("export", "small", "--to", "out")
    assert result.code == 3
    assert "package torch is not installed" in result.err
    assert "pip install 'hpjob[train]'" in result.err
