"""Writes weights as safetensors shards with an index, a tensor at a time into memory, a shard at a time to disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from hpjob.recipe.weight_files import INDEX_NAME, SINGLE_NAME
from hpjob.runtime.hugging_face.layout import pieces_of
from hpjob.runtime.model.families import Family


def write_weights(
    folder: Path,
    parameters: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    family: Family,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> int:
    """Write parameters in the layout of published files.

    Args:
        folder: Exists.
        parameters: Shape by name, in the order of the model.
        read: Returns one whole parameter.
        family: Names the tensors.
        dtype: Of the files.
        max_shard_bytes: Largest file, unless a single parameter needs more.

    Returns:
        Bytes of all tensors.
    """
    shards = list(_shards(parameters, dtype.itemsize, max_shard_bytes))
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, start=1):
        file = SINGLE_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors |= _file_tensors(name, read(name), family, dtype)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def _shards(parameters: Mapping[str, tuple[int, ...]], itemsize: int, limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, shape in parameters.items():
        own = torch.Size(shape).numel() * itemsize
        if names and size + own > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += own
    yield names


def _file_tensors(name: str, whole: Tensor, family: Family, dtype: torch.dtype) -> dict[str, Tensor]:
    found = {}
    for piece in pieces_of(name, tuple(whole.shape), family):
        part = whole[tuple(slice(None) if at is None else at for at in piece.index)]
        found[piece.source] = torch.empty(piece.shape, dtype=dtype).copy_(part)
    return found
