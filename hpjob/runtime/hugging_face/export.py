"""A checkpoint as a Hugging Face folder: one process, no GPU, one parameter in memory at a time beside a shard."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from hpjob.core.durable import sync_folder
from hpjob.core.errors import EnvironmentProblemError, UserInputError
from hpjob.core.run_dir import RunDir
from hpjob.recipe.load import load_recipe
from hpjob.recipe.model import Recipe
from hpjob.runtime.checkpoint.folder import CheckpointFolder
from hpjob.runtime.checkpoint.manifest import DATA_NAME, check_file
from hpjob.runtime.hugging_face.config import written_config
from hpjob.runtime.hugging_face.layout import model_parameters
from hpjob.runtime.hugging_face.tokenizer import copy_small_files
from hpjob.runtime.hugging_face.write import write_weights
from hpjob.runtime.model.families import family_of

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What was written."""

    folder: Path
    step: int
    dtype: str
    size_bytes: int
    notes: tuple[str, ...]
    """What a person has to know; one sentence each."""


def export_run(
    run: RunDir,
    to: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Exported:
    """Write a run's checkpoint as a folder that transformers loads.

    Args:
        run: With complete checkpoints.
        to: Folder to make; must not exist, or be empty.
        step: Checkpoint to take; None = the newest.
        dtype: ``bf16``, ``fp16`` or ``fp32``; None = the recipe's precision.
        max_shard_bytes: Largest file.

    Raises:
        UserInputError: No such checkpoint, or ``to`` holds something.
        EnvironmentProblemError: The checkpoint is damaged, or the folder cannot be written.
    """
    recipe = load_recipe(str(run.recipe))
    chosen = dtype or recipe.parallel.precision
    if chosen not in _DTYPES:
        raise UserInputError(f"unknown dtype {chosen!r}", hint=f"use {', '.join(_DTYPES)}")
    data, step = _verified(CheckpointFolder(run), step)
    with new_folder(to) as partial:
        size, notes = export_data(data, recipe, partial, dtype=_DTYPES[chosen], max_shard_bytes=max_shard_bytes)
    return Exported(folder=to, step=step, dtype=chosen, size_bytes=size, notes=tuple(notes))


def export_data(
    data: Path, recipe: Recipe, folder: Path, *, dtype: torch.dtype, max_shard_bytes: int = MAX_SHARD_BYTES
) -> tuple[int, list[str]]:
    """Write what torch's distributed checkpoint in ``data`` holds of a model into ``folder``.

    Returns:
        Bytes of the tensors, and notes.

    Raises:
        EnvironmentProblemError: A parameter is missing or has another shape.
    """
    family = family_of(recipe.model.model_type)
    parameters = model_parameters(family, recipe.model)
    reader = _CheckpointReader(data, parameters)
    size = write_weights(folder, parameters, reader.read, family, dtype=dtype, max_shard_bytes=max_shard_bytes)
    token_ids, notes = copy_small_files(recipe, folder)
    written_config(family, recipe.model, dtype, token_ids).save_pretrained(folder)
    return size, notes


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a folder to write to, which gets its name when all is written.

    Raises:
        UserInputError: The name is taken.
        EnvironmentProblemError: The file system refuses.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserInputError(f"{path} exists already", hint="choose a new folder; nothing was changed")
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        if path.exists():
            path.rmdir()
        partial.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        raise EnvironmentProblemError(
            f"cannot write {error.filename or path}: {error.strerror or error}",
            hint="choose another folder or free some space",
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _verified(folder: CheckpointFolder, step: int | None) -> tuple[Path, int]:
    steps = folder.steps()
    if not steps:
        raise UserInputError(f"{folder.path} has no complete checkpoint", hint="export after the first one was saved")
    if step is not None and step not in steps:
        raise UserInputError(
            f"{folder.path} has no checkpoint of step {step}", hint=f"there are {', '.join(map(str, steps))}"
        )
    step = step or steps[0]
    data = folder.complete(step) / DATA_NAME
    try:
        damage = [problem for file in folder.read(step).files if (problem := check_file(data, file))]
    except (OSError, ValueError) as error:
        damage = [f"manifest.json: {error}"]
    if damage:
        older = [str(other) for other in steps if other < step]
        raise EnvironmentProblemError(
            f"the checkpoint of step {step} is damaged: {'; '.join(damage[:3])}",
            hint=f"export an older one: --step {older[0]}" if older else "there is no older one",
        )
    return data, step


class _CheckpointReader:
    """Reads single parameters of a checkpoint on one process."""

    def __init__(self, data: Path, parameters: dict[str, tuple[int, ...]]) -> None:
        self._reader = _ReadOnce(data)
        stored = self._reader.read_metadata().state_dict_metadata
        for name, shape in parameters.items():
            entry = stored.get(name)
            found = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
            if found != shape:
                raise EnvironmentProblemError(
                    f"{data} has {name} of shape {found}, the recipe's model {shape}",
                    hint="the run folder's recipe.yaml is not the one that wrote this checkpoint",
                )
        self._shapes = parameters

    def read(self, name: str) -> Tensor:
        """Return a whole parameter, fp32."""
        values = torch.empty(self._shapes[name])
        with warnings.catch_warnings():
            # That one process is meant need not be said with every tensor.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load({name: values}, storage_reader=self._reader, no_dist=True)
        return values


class _ReadOnce(FileSystemReader):
    """Keeps the metadata, which :func:`load` asks for again with every tensor."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Return the checkpoint's metadata."""
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata
