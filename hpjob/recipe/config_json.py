"""Model shapes from a transformers ``config.json``, read as plain JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpjob.core.errors import UserInputError
from hpjob.core.schema import nearest
from hpjob.recipe.model import ModelShape

KNOWN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma", "mixtral", "qwen3_moe")
"""Values of ``model_type`` whose decoder layers have the shape that the planner assumes."""

_OTHER_NAMES = {"num_local_experts": "num_experts"}
NOT_COMPUTED_WITH = frozenset(
    {
        *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
        *("use_cache", "output_router_logits", "output_attentions", "output_hidden_states", "return_dict"),
        *("attention_dropout", "router_aux_loss_coef", "router_jitter_noise", "initializer_range"),
        *("pretraining_tp", "tokenizer_class", "is_encoder_decoder", "problem_type", "id2label", "label2id"),
        *("chunk_size_feed_forward", "model_type", "max_position_embeddings"),
    }
)
"""Keys that do not change what a forward pass computes while training."""


def shape_from_config(path: Path) -> dict[str, Any]:
    """Read the fields of :class:`ModelShape` from a ``config.json`` or the folder that holds one.

    Raises:
        UserInputError: No such file, no JSON object, or a family that is not known.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserInputError(f"model.config: no such file: {file}", hint="give the path of a config.json") from None
    except (OSError, ValueError) as error:
        raise UserInputError(f"model.config: {file} is no JSON: {error}", hint="give a model's config.json") from None
    if not isinstance(config, dict):
        raise UserInputError(f"model.config: {file} holds no JSON object", hint="give a model's config.json")
    return shape_from_values(config, source=f"model.config: {file}")


def shape_from_values(config: dict[str, Any], *, source: str) -> dict[str, Any]:
    """Pick the fields of :class:`ModelShape` out of the values of a config.

    Args:
        config: As a ``config.json`` has them.
        source: Begins every message.

    Raises:
        UserInputError: Quantized weights, or a family that is not known.
    """
    if config.get("quantization_config"):
        raise UserInputError(
            f"{source} is of quantized weights, which cannot be trained",
            hint="use the folder of the model in bf16, fp16 or fp32",
        )
    family = str(config.get("model_type", ""))
    if not family:
        raise UserInputError(f"{source} has no model_type", hint=f"known are {', '.join(KNOWN_FAMILIES)}")
    if family not in KNOWN_FAMILIES:
        guess = nearest(family, KNOWN_FAMILIES)
        raise UserInputError(
            f"{source}: model_type `{family}` is not known",
            hint=(f"did you mean `{guess}`? " if guess else "") + f"known are {', '.join(KNOWN_FAMILIES)}",
        )
    return _fields(config)


def _fields(config: dict[str, Any]) -> dict[str, Any]:
    known = set(ModelShape.model_fields) - {"config_values"}
    renamed = {_OTHER_NAMES.get(key, key): value for key, value in config.items()}
    fields = {key: value for key, value in renamed.items() if key in known and value is not None}
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(rope, dict) and "rope_theta" in rope:
        fields["rope_theta"] = rope["rope_theta"]
    if "num_attention_heads" in fields:
        # Older files of models without grouped heads leave the number of key-value heads out.
        fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    further = _further_values(renamed, known, rope)
    if further:
        fields["config_values"] = further
    return fields


def _further_values(config: dict[str, Any], known: set[str], rope: object) -> dict[str, Any]:
    """Return what decides the computation and has no field of its own."""
    skipped = known | NOT_COMPUTED_WITH | {"rope_parameters", "rope_scaling"}
    further = {key: value for key, value in config.items() if key not in skipped}
    kinds = further.get("layer_types")
    if isinstance(kinds, list) and set(kinds) == {"full_attention"}:
        further.pop("layer_types")
    if isinstance(rope, dict) and rope.get("rope_type", rope.get("type", "default")) != "default":
        further["rope_parameters"] = rope
    return further
