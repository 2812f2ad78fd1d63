"""The small files beside the weights: tokenizer and generation settings."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from hpjob.core.errors import UserInputError
from hpjob.recipe.data_files import TOKENIZER_NAME, TokenFilesMeta, read_meta
from hpjob.recipe.model import Recipe

_GENERATION = "generation_config.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def copy_small_files(recipe: Recipe, folder: Path) -> tuple[dict[str, int | None], list[str]]:
    """Copy tokenizer and generation settings from the data and from the weights that training began with.

    Args:
        recipe: Names both folders.
        folder: Where they go.

    Returns:
        Token ids for the config, and what was not found, in words.
    """
    start = Path(recipe.training.initial_weights) if recipe.training.initial_weights else None
    meta = _data_meta(recipe)
    notes = []
    ids = _ids_of(start) if start else {}
    if start and (start / _GENERATION).is_file():
        shutil.copyfile(start / _GENERATION, folder / _GENERATION)
    if start and _has_tokenizer(start, meta):
        for name in _TOKENIZER_FILES:
            if (start / name).is_file():
                shutil.copyfile(start / name, folder / name)
    elif meta is not None and (Path(recipe.data.path or "") / TOKENIZER_NAME).is_file():
        shutil.copyfile(Path(recipe.data.path or "") / TOKENIZER_NAME, folder / TOKENIZER_NAME)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": meta.eos_token}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        ids |= {"eos_token_id": meta.eos_token_id}
    else:
        notes.append("no tokenizer files were found, neither in data.path nor in training.initial_weights")
    return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **ids}, notes


def _data_meta(recipe: Recipe) -> TokenFilesMeta | None:
    try:
        return read_meta(Path(recipe.data.path)) if recipe.data.path else None
    except UserInputError:
        return None


def _has_tokenizer(start: Path, meta: TokenFilesMeta | None) -> bool:
    """Whether the folder's tokenizer made the tokens that were trained on, or nothing else is known."""
    path = start / TOKENIZER_NAME
    if not path.is_file():
        return False
    return meta is None or hashlib.sha256(path.read_bytes()).hexdigest() == meta.tokenizer_sha256


def _ids_of(start: Path) -> dict[str, int | None]:
    try:
        config = json.loads((start / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
