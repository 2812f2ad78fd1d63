"""``config.json``: compared with the model that is trained, and written for one that was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from hpjob.core.errors import UserInputError
from hpjob.recipe.config_json import NOT_COMPUTED_WITH
from hpjob.recipe.model import ModelShape
from hpjob.runtime.model.families import Family


def config_differences(folder: Path, family: Family, shape: ModelShape) -> list[str]:
    """Return one sentence for each value that makes the folder's model compute otherwise than ours.

    Raises:
        UserInputError: The folder has no readable ``config.json``.
    """
    try:
        theirs = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserInputError(
            f"initial weights: {folder / 'config.json'} cannot be read: {error}",
            hint="give a folder that save_pretrained of transformers wrote",
        ) from None
    if theirs.model_type != shape.model_type:
        return [f"model_type is {theirs.model_type}, the recipe has {shape.model_type}"]
    found, wanted = _decisive(theirs), _decisive(family.config(shape))
    return [
        f"{name} is {found.get(name)}, the recipe's model has {wanted.get(name)}"
        for name in sorted(found.keys() | wanted.keys())
        if found.get(name) != wanted.get(name)
    ]


def written_config(family: Family, shape: ModelShape, dtype: torch.dtype, token_ids: dict[str, int | None]) -> Any:
    """Return the config of an exported model.

    Args:
        family: Makes the config that the model was trained with.
        shape: Likewise.
        dtype: Of the exported weights.
        token_ids: ``bos_token_id`` and the like.
    """
    config = family.config(shape)
    config.architectures = [f"{family.class_prefix}ForCausalLM"]
    config.dtype = dtype
    config.use_cache = True
    for name, value in token_ids.items():
        setattr(config, name, value)
    return config


def _decisive(config: Any) -> dict[str, Any]:
    """Return what decides the computation, in one form where there are several.

    A config keeps whatever a file says; what its class does not know is not computed with.
    """
    known = type(config)().to_dict().keys() - NOT_COMPUTED_WITH
    values = {name: value for name, value in config.to_dict().items() if name in known}
    values["head_dim"] = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    unused = []
    if values.get("use_sliding_window") is False:
        unused += ["sliding_window", "max_window_layers"]
    if set(values.get("layer_types") or ()) <= {"full_attention"}:
        unused += ["layer_types"]
    return {name: value for name, value in values.items() if name not in unused}
