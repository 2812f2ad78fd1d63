"""Folders of plain transformers are read into any layout; what is exported loads with plain transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from hpjob.core.errors import UserInputError
from hpjob.runtime.hugging_face.export import export_data
from hpjob.runtime.process_pool import ProcessPool, WorkerError
from tests.runtime.hugging_face.jobs import case_of, evaluate_and_train, plain_loss, plain_model

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "llama": ("tp_size=2 pp_size=2", "dp_size=2 zero_stage=3 num_microbatches=2"),
    "mistral": ("tp_size=4", "pp_size=2"),
    "qwen2": ("tp_size=2 pp_size=2", "tp_size=4 sequence_parallelism_mode=ring"),
    "qwen3": ("tp_size=2 pp_size=2 pp_style=zbv num_model_chunks=2", "dp_size=2 zero_stage=1 num_microbatches=2"),
    "smollm3": ("tp_size=4", "pp_size=2"),
    "gemma": ("tp_size=2 pp_size=2", "sp_size=2 sequence_parallelism_mode=ring_attn"),
    "mixtral": ("tp_size=2 dp_size=2 ep_size=2 zero_stage=1 num_microbatches=2", "pp_size=2"),
    "qwen3_moe": ("tp_size=2 pp_size=2", "dp_size=2 ep_size=2 zero_stage=1 num_microbatches=2"),
}


@pytest.mark.parametrize("model", LAYOUTS)
def test_a_folder_is_trained_exported_and_trained_on(pool: ProcessPool, model: str, tmp_path: Path) -> None:
    first, second = LAYOUTS[model]
    case = case_of(model, first)
    start = plain_model(case.recipe)
    # More than one file: the tensors of one layer lie in several.
    start.save_pretrained(tmp_path / "start", max_shard_size="20KB")
    losses = pool.run(evaluate_and_train, model, first, tmp_path / "start", 2, tmp_path / "saved", world=case.world)
    assert losses[0][0] == pytest.approx(plain_loss(start, case.recipe), rel=1e-5)
    assert losses[0][1] < losses[0][0]

    (tmp_path / "out").mkdir()
    export_data(tmp_path / "saved", case.recipe, tmp_path / "out", dtype=torch.float32, max_shard_bytes=20_000)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.config.tie_word_embeddings == case.recipe.model.tie_word_embeddings
    assert plain_loss(exported, case.recipe) == pytest.approx(losses[0][1], rel=1e-5)

    again = case_of(model, second)
    continued = pool.run(evaluate_and_train, model, second, tmp_path / "out", 0, None, world=again.world)
    assert continued[0][0] == pytest.approx(losses[0][1], rel=1e-5)


def test_an_untrained_export_has_the_same_names_and_bits(pool: ProcessPool, tmp_path: Path) -> None:
    case = case_of("mixtral", "tp_size=2 dp_size=2 ep_size=2 num_microbatches=2")
    plain_model(case.recipe).save_pretrained(tmp_path / "start")
    pool.run(evaluate_and_train, "mixtral", case.text, tmp_path / "start", 0, tmp_path / "saved", world=4)
    (tmp_path / "out").mkdir()
    export_data(tmp_path / "saved", case.recipe, tmp_path / "out", dtype=torch.float32)
    with (
        safe_open(tmp_path / "start/model.safetensors", "pt") as before,
        safe_open(tmp_path / "out/model.safetensors", "pt") as after,
    ):
        assert set(before.keys()) == set(after.keys())
        assert all(torch.equal(before.get_tensor(name), after.get_tensor(name)) for name in before.keys())  # noqa: SIM118


def test_stacked_experts_are_read(pool: ProcessPool, tmp_path: Path) -> None:
    """Files with all experts of a layer in one tensor, under the names of the modules."""
    case = case_of("qwen3_moe", "tp_size=2 dp_size=2 ep_size=2 num_microbatches=2")
    start = plain_model(case.recipe)
    start.save_pretrained(tmp_path / "start", save_original_format=False)
    with safe_open(tmp_path / "start/model.safetensors", "pt") as file:
        assert "model.layers.0.mlp.experts.gate_up_proj" in file.keys()  # noqa: SIM118
    losses = pool.run(evaluate_and_train, "qwen3_moe", case.text, tmp_path / "start", 0, None, world=4)
    assert losses[0][0] == pytest.approx(plain_loss(start, case.recipe), rel=1e-5)


def test_a_folder_of_another_model_is_refused_on_all_ranks(pool: ProcessPool, tmp_path: Path) -> None:
    plain_model(case_of("llama", "").recipe).save_pretrained(tmp_path / "start")
    with pytest.raises(WorkerError) as caught:
        pool.run(evaluate_and_train, "qwen2", "tp_size=2", tmp_path / "start", 0, None, world=2)
    assert "model_type is llama, the recipe has qwen2" in (caught.value.refusal or "")


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_taken_folder_is_left_alone(name: str, tmp_path: Path) -> None:
    from hpjob.runtime.hugging_face.export import new_folder

    (tmp_path / name).mkdir()
    (tmp_path / name / "mine").write_text("x")
    with pytest.raises(UserInputError, match="exists already"), new_folder(tmp_path / name):
        pass
    assert (tmp_path / name / "mine").read_text() == "x"
