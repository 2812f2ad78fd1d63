"""Model shapes from a transformers ``config.json``, read as plain JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpjob.core.errors import UserInputError
from hpjob.core.schema import nearest
from hpjob.recipe.model import ModelShape

KNOWN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
"""Values of ``model_type`` whose decoder layers have the shape that the planner assumes."""

_OTHER_NAMES = {"num_local_experts": "num_experts"}


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
    family = str(config.get("model_type", ""))
    if family not in KNOWN_FAMILIES:
        guess = nearest(family, KNOWN_FAMILIES)
        raise UserInputError(
            f"model.config: model_type `{family}` is not known",
            hint=(f"did you mean `{guess}`? " if guess else "") + f"known are {', '.join(KNOWN_FAMILIES)}",
        )
    return _fields(config)


def _fields(config: dict[str, Any]) -> dict[str, Any]:
    known = ModelShape.model_fields
    renamed = {_OTHER_NAMES.get(key, key): value for key, value in config.items()}
    fields = {key: value for key, value in renamed.items() if key in known and value is not None}
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(rope, dict) and "rope_theta" in rope:
        fields["rope_theta"] = rope["rope_theta"]
    if "num_attention_heads" in fields:
        # Older files of models without grouped heads leave the number of key-value heads out.
        fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    return fields
