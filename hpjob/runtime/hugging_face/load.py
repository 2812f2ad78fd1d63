"""Reads a Hugging Face folder into the shards of this rank, each rank only the slices that it holds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open

from hpjob.core.errors import UserInputError
from hpjob.recipe.model import ModelShape
from hpjob.recipe.weight_files import FLOAT_TYPES, TensorEntry, read_weight_files
from hpjob.runtime.agreement import on_rank_zero
from hpjob.runtime.hugging_face.config import config_differences
from hpjob.runtime.hugging_face.layout import Piece, is_stacked, model_parameters, pieces_of
from hpjob.runtime.model.families import Family, family_of
from hpjob.runtime.model.parameters import ShardedParameter
from hpjob.runtime.model.stage import HEAD
from hpjob.runtime.parallel.region import Region

log = logging.getLogger(__name__)
_SHOWN = 12


def load_weights(folder: Path, shape: ModelShape, parameters: Sequence[ShardedParameter]) -> None:
    """Fill the parameters of this rank from a folder, one at a time. A collective of all ranks.

    Args:
        folder: With ``config.json`` and safetensors files.
        shape: Of the model that is trained.
        parameters: This rank's.

    Raises:
        UserInputError: The folder holds another model: every missing, unexpected or wrongly shaped tensor is named.
        AgreedError: Rank 0 cannot read the folder.
    """
    entries, refusal = on_rank_zero(lambda: _look_into(folder, shape))
    if refusal is not None:
        raise UserInputError(*refusal[:1], hint=refusal[1])
    family = family_of(shape.model_type)
    stacked = is_stacked(entries)
    with _OpenFiles(folder) as files:
        for item in parameters:
            pieces = pieces_of(item.name, item.region.shape, family, stacked=stacked)
            _fill(item, pieces, entries, files)
    log.info("weights of %s loaded", folder)


def weight_problems(
    entries: Mapping[str, TensorEntry], expected: Mapping[str, tuple[int, ...]], shape: ModelShape
) -> list[str]:
    """Return one sentence for each kind of difference between a folder and a model, with the tensors by name.

    Args:
        entries: What the folder holds.
        expected: Shapes by the names that files use.
        shape: Of the model.
    """
    spare = {HEAD} if shape.tie_word_embeddings else set()
    missing = [name for name in expected if name not in entries]
    unexpected = [n for n in entries if n not in expected and n not in spare and not n.endswith("rotary_emb.inv_freq")]
    common = [name for name in expected if name in entries]
    wrong = [
        f"{name} {list(entries[name].shape)} instead of {list(expected[name])}"
        for name in common
        if entries[name].shape != expected[name]
    ]
    quantized = [f"{name} ({entries[name].dtype})" for name in common if entries[name].dtype not in FLOAT_TYPES]
    kinds = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape": wrong,
        "of a type that cannot be trained": quantized,
    }
    return [f"{len(names)} tensors {kind}: {_listed(names)}" for kind, names in kinds.items() if names]


def expected_tensors(family: Family, shape: ModelShape, *, stacked: bool) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that files of a model have, by their names."""
    return {
        piece.source: piece.shape
        for name, whole in model_parameters(family, shape).items()
        for piece in pieces_of(name, whole, family, stacked=stacked)
    }


def _look_into(folder: Path, shape: ModelShape) -> tuple[dict[str, TensorEntry], tuple[str, str] | None]:
    """Return the folder's tensors, and message and hint where they are not this model's."""
    family = family_of(shape.model_type)
    try:
        entries = read_weight_files(folder)
        problems = config_differences(folder, family, shape)
    except UserInputError as error:
        return {}, (error.message, error.hint)
    problems += weight_problems(entries, expected_tensors(family, shape, stacked=is_stacked(entries)), shape)
    if not problems:
        return entries, None
    hint = f"take the model from the folder: model.config={folder}"
    if not shape.tie_word_embeddings and HEAD not in entries:
        hint += "; a folder without lm_head.weight is of a model with tie_word_embeddings"
    return {}, ("\n".join(f"initial weights {folder}: {problem}" for problem in problems), hint)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


class _OpenFiles:
    """Files of a folder, opened when they are first read; they are mapped, so what is not read costs no memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()

    def read(self, entry: TensorEntry, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """Read a rectangle of a tensor, and no more of the file than that."""
        if entry.file not in self._open:
            self._open[entry.file] = safe_open(self._folder / entry.file, framework="pt")
        values: torch.Tensor = self._open[entry.file].get_slice(name)[part]
        return values


def _fill(
    item: ShardedParameter, pieces: Sequence[Piece], entries: Mapping[str, TensorEntry], files: _OpenFiles
) -> None:
    region: Region = item.region
    local = item.local
    with torch.no_grad():
        for piece in pieces if local.numel() else ():
            overlap = piece.overlap(region)
            if overlap is not None:
                source, target = overlap
                local[target].copy_(files.read(entries[piece.source], piece.source, source))
    item.publish()
