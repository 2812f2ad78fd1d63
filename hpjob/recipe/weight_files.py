"""Hugging Face folders of weights: which tensors their safetensors files hold, read from the headers alone.

Needs no torch, so that submission can look into a folder on a login node.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpjob.core.errors import UserInputError
from hpjob.recipe.config_json import shape_from_config
from hpjob.recipe.model import ModelShape

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_LARGEST_HEADER = 100_000_000
_HINT = "give a folder with config.json and safetensors files, as save_pretrained of transformers writes it"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a folder."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    """As safetensors writes it, such as ``BF16``."""


def read_weight_files(folder: Path) -> dict[str, TensorEntry]:
    """Return every tensor of a folder by name.

    Raises:
        UserInputError: No folder, no safetensors, or files and index do not fit each other.
    """
    if not folder.is_dir():
        raise UserInputError(f"initial weights: no such folder: {folder}", hint=_HINT)
    if (folder / INDEX_NAME).is_file():
        return _indexed(folder)
    if (folder / SINGLE_NAME).is_file():
        return _read_header(folder / SINGLE_NAME)
    pickled = sorted(folder.glob("pytorch_model*.bin"))
    what = f"only {pickled[0].name}, which is pickled" if pickled else f"neither {SINGLE_NAME} nor {INDEX_NAME}"
    raise UserInputError(f"initial weights: {folder} has {what}", hint=_HINT)


def check_weight_files(path: str | Path, model: ModelShape) -> None:
    """Check that a folder can hold the weights of a model, as far as config and headers tell.

    Raises:
        UserInputError: It cannot; one line for each value that differs.
    """
    folder = Path(path)
    entries = read_weight_files(folder)
    found = shape_from_config(folder)
    wanted = model.model_dump(mode="json")
    decisive = set(found) - {"max_position_embeddings", "initializer_range", "config_values"}
    lines = [
        f"initial weights: {folder / CONFIG_NAME} has {name} {found[name]}, the recipe has {wanted[name]}"
        for name in sorted(decisive)
        if found[name] != wanted[name] and not _is_default_head_dim(name, found[name], model)
    ]
    quantized = sorted({entry.dtype for entry in entries.values()} - set(FLOAT_TYPES))
    if quantized:
        lines.append(f"initial weights: {folder} holds tensors of type {', '.join(quantized)}, which cannot be trained")
    if lines:
        raise UserInputError("\n".join(lines), hint=f"take the model from the folder: model.config={folder}")


def _is_default_head_dim(name: str, value: object, model: ModelShape) -> bool:
    return name == "head_dim" and value == model.attention_head_dim


def _indexed(folder: Path) -> dict[str, TensorEntry]:
    document = _json(folder / INDEX_NAME)
    mapping = document.get("weight_map")
    if not isinstance(mapping, Mapping):
        raise UserInputError(f"initial weights: {folder / INDEX_NAME} has no weight_map", hint=_HINT)
    entries: dict[str, TensorEntry] = {}
    for name in sorted(set(map(str, mapping.values()))):
        if Path(name).name != name:
            raise UserInputError(f"initial weights: {INDEX_NAME} names {name!r}, no file beside it", hint=_HINT)
        if not (folder / name).is_file():
            raise UserInputError(
                f"initial weights: {INDEX_NAME} names {name}, which is not there", hint="copy the folder once more"
            )
        entries |= _read_header(folder / name)
    lost = sorted(tensor for tensor in mapping if tensor not in entries)
    if lost:
        raise UserInputError(
            f"initial weights: {INDEX_NAME} names {len(lost)} tensors that no file holds, such as {lost[0]}",
            hint="copy the folder once more",
        )
    return entries


def _read_header(path: Path) -> dict[str, TensorEntry]:
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length)) if length <= min(size, _LARGEST_HEADER) else None
    except (OSError, ValueError, struct.error) as error:
        raise UserInputError(f"initial weights: {path} cannot be read: {error}", hint=_HINT) from None
    if not isinstance(header, dict):
        raise UserInputError(f"initial weights: {path} is no safetensors file", hint=_HINT)
    header.pop("__metadata__", None)
    end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    if size != 8 + length + end:
        raise UserInputError(
            f"initial weights: {path} has {size} bytes instead of {8 + length + end}", hint="copy the file once more"
        )
    return {
        name: TensorEntry(file=path.name, shape=tuple(entry["shape"]), dtype=str(entry["dtype"]))
        for name, entry in header.items()
    }


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserInputError(f"initial weights: {path} cannot be read: {error}", hint=_HINT) from None
    return document if isinstance(document, dict) else {}
