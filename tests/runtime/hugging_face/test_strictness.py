"""Differences between a folder and a model are all named at once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpjob.core.errors import UserInputError
from hpjob.core.schema import parse
from hpjob.recipe.config_json import shape_from_config
from hpjob.recipe.model import ModelShape
from hpjob.recipe.weight_files import TensorEntry, check_weight_files, read_weight_files
from hpjob.runtime.hugging_face.config import config_differences
from hpjob.runtime.hugging_face.layout import is_stacked, model_parameters, pieces_of
from hpjob.runtime.hugging_face.load import expected_tensors, weight_problems
from hpjob.runtime.model.families import family_of
from tests.runtime.hugging_face.jobs import case_of, plain_model


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    plain_model(case_of("llama", "").recipe).save_pretrained(folder, max_shard_size="20KB")
    return folder


def test_missing_unexpected_and_wrong_are_named_together() -> None:
    case = case_of("llama", "")
    expected = expected_tensors(family_of("llama"), case.recipe.model, stacked=False)
    entries = {name: TensorEntry("f", shape, "F32") for name, shape in expected.items()}
    assert weight_problems(entries, expected, case.recipe.model) == []
    del entries["model.norm.weight"]
    entries["model.layers.9.mlp.up_proj.weight"] = TensorEntry("f", (48, 32), "F32")
    entries["lm_head.weight"] = TensorEntry("f", (98, 32), "F32")
    entries["model.layers.0.mlp.up_proj.weight"] = TensorEntry("f", (48, 32), "F8_E4M3")
    assert weight_problems(entries, expected, case.recipe.model) == [
        "1 tensors missing: model.norm.weight",
        "1 tensors unexpected: model.layers.9.mlp.up_proj.weight",
        "1 tensors of another shape: lm_head.weight [98, 32] instead of [97, 32]",
        "1 tensors of a type that cannot be trained: model.layers.0.mlp.up_proj.weight (F8_E4M3)",
    ]


def test_a_tied_model_may_come_with_its_head_and_old_buffers() -> None:
    shape = case_of("qwen2", "").recipe.model
    expected = expected_tensors(family_of("qwen2"), shape, stacked=False)
    assert "lm_head.weight" not in expected
    entries = {name: TensorEntry("f", size, "BF16") for name, size in expected.items()}
    entries["lm_head.weight"] = TensorEntry("f", (96, 32), "BF16")
    entries["model.layers.0.self_attn.rotary_emb.inv_freq"] = TensorEntry("f", (4,), "F32")
    assert weight_problems(entries, expected, shape) == []


@pytest.mark.parametrize("model", ["llama", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("stacked", [False, True])
def test_pieces_cover_a_parameter_once(model: str, stacked: bool) -> None:
    shape, family = case_of(model, "").recipe.model, family_of(model)
    for name, size in model_parameters(family, shape).items():
        covered = torch.zeros(size)
        for piece in pieces_of(name, size, family, stacked=stacked):
            covered[tuple(slice(None) if at is None else at for at in piece.index)] += 1
        assert bool((covered == 1).all()), name


def test_headers_are_read_without_torch(start: Path) -> None:
    entries = read_weight_files(start)
    assert len({entry.file for entry in entries.values()}) > 1
    assert entries["lm_head.weight"].shape == (97, 32)
    assert not is_stacked(entries)
    check_weight_files(start, case_of("llama", "").recipe.model)


def test_a_config_that_differs_is_refused_before_the_queue(start: Path) -> None:
    model = case_of("llama", "").recipe.model.model_copy(update={"hidden_size": 64, "rope_theta": 5e5})
    with pytest.raises(UserInputError) as caught:
        check_weight_files(start, model)
    assert "has hidden_size 32, the recipe has 64" in caught.value.message
    assert "has rope_theta 10000.0, the recipe has 500000.0" in caught.value.message
    assert "model.config=" in caught.value.hint


def _cut_a_file(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-8])


def _lose_a_file(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def _lose_a_tensor(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    tensors = load_file(path)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, path)


def _only_pickles(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")


def _quantize(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"bits": 4}}))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_cut_a_file, "bytes instead of"),
        (_lose_a_file, "which is not there"),
        (_lose_a_tensor, "that no file holds"),
        (_only_pickles, "only pytorch_model.bin, which is pickled"),
        (_quantize, "quantized weights, which cannot be trained"),
    ],
)
def test_a_damaged_folder_is_refused(damage: object, sentence: str, start: Path, tmp_path: Path) -> None:
    shutil.copytree(start, tmp_path / "copy")
    damage(tmp_path / "copy")  # type: ignore[operator]
    with pytest.raises(UserInputError, match=sentence):
        check_weight_files(tmp_path / "copy", case_of("llama", "").recipe.model)


LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_scaled_rotary_bases_and_windows_are_kept_or_named(start: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(start, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters")
    config |= {"rope_theta": 5e5, "rope_scaling": {**LLAMA3_ROPE, "original_max_position_embeddings": 64}}
    (folder / "config.json").write_text(json.dumps(config))
    family = family_of("llama")
    kept = parse(ModelShape, shape_from_config(folder), source="config")
    assert config_differences(folder, family, kept) == []
    assert family.config(kept).rope_parameters["factor"] == 8.0
    lost = kept.model_copy(update={"config_values": None})
    (difference,) = config_differences(folder, family, lost)
    assert difference.startswith("rope_parameters is {")


def test_a_window_that_the_file_switches_off_stays_off(tmp_path: Path) -> None:
    plain_model(case_of("mistral", "").recipe).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": None}))
    shape = parse(ModelShape, shape_from_config(tmp_path), source="config")
    assert family_of("mistral").config(shape).sliding_window is None
    assert config_differences(tmp_path, family_of("mistral"), shape) == []
    assert (
        "sliding_window is None"
        in config_differences(tmp_path, family_of("mistral"), case_of("mistral", "").recipe.model)[0]
    )


def test_what_published_files_leave_out_or_say_without_effect_is_no_difference(tmp_path: Path) -> None:
    """As files of Qwen2.5 do: no head_dim, and a window that is not used."""
    shape = case_of("qwen2", "").recipe.model
    config = {"model_type": "qwen2", **shape.model_dump(exclude={"model_type", "config_values", "head_dim"})}
    config |= {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 3, "use_mrope": False}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    assert config_differences(tmp_path, family_of("qwen2"), shape) == []
    named = parse(ModelShape, shape_from_config(tmp_path), source="config")
    assert config_differences(tmp_path, family_of("qwen2"), named) == []
