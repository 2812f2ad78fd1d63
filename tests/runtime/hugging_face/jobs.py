"""What ranks do for these tests; plain transformers models to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoModelForCausalLM

from hpjob.recipe.model import Recipe
from hpjob.runtime.engine import Engine
from hpjob.runtime.hugging_face.load import load_weights
from hpjob.runtime.mesh import build_mesh
from hpjob.runtime.model.families import family_of
from hpjob.runtime.parity.case import Case, parse_case
from hpjob.runtime.parity.data import global_batch, rank_batch

SMALL = "num_hidden_layers=4 hidden_size=32 intermediate_size=48 seq_length=16 precision=fp32 num_microbatches=4"
EXPERTS = "num_experts=4 num_experts_per_tok=2 moe_intermediate_size=20"
MODELS = {
    "llama": "vocab_size=97",
    "mistral": "vocab_size=96 num_key_value_heads=1",
    "qwen2": "vocab_size=96 tie_word_embeddings=true",
    "qwen3": "vocab_size=97 head_dim=8 tie_word_embeddings=true",
    "smollm3": "vocab_size=96 tie_word_embeddings=true",
    "gemma": "vocab_size=96 head_dim=8 tie_word_embeddings=true",
    "mixtral": f"vocab_size=96 {EXPERTS}",
    "qwen3_moe": f"vocab_size=96 {EXPERTS} tie_word_embeddings=true",
}


def case_of(model: str, layout: str) -> Case:
    return parse_case(f"{SMALL} {MODELS[model]} {layout}", world=None, steps=4, model_type=model)


def plain_model(recipe: Recipe) -> Any:
    """Return a transformers model with random weights, norms included."""
    torch.manual_seed(5)
    config = family_of(recipe.model.model_type).config(recipe.model)
    config.pad_token_id = None  # some families have one beyond the small vocabulary
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def plain_loss(model: Any, recipe: Recipe) -> float:
    batch = global_batch(recipe, 1)
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).item()


def evaluate_and_train(model: str, layout: str, folder: Path, steps: int, save_to: Path | None) -> list[float]:
    """Load a folder, evaluate, train some steps, evaluate again; return both losses."""
    case = case_of(model, layout)
    mesh = build_mesh(case.plan, "cpu")
    engine = Engine(case.plan, case.recipe, mesh, torch.device("cpu"))
    load_weights(folder, case.recipe.model, engine.parameters)

    def batch(step: int) -> Any:
        return rank_batch(global_batch(case.recipe, step), mesh.dp_rank, mesh.dp_size)

    losses = [engine.evaluate(batch(1))[0]]
    for step in range(1, steps + 1):
        engine.train_step(batch(step), step)
    if steps:
        losses.append(engine.evaluate(batch(1))[0])
    if save_to is not None:
        save(engine.state_dict(), checkpoint_id=save_to)
    return losses
