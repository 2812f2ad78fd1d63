"""A Hugging Face folder of a model that is spread over ranks, without ever having all of it in one memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from hpjob.core.errors import UserInputError
from hpjob.recipe.model import Recipe
from hpjob.runtime.agreement import AgreedError, on_rank_zero
from hpjob.runtime.engine import Engine
from hpjob.runtime.hugging_face.export import export_data, new_folder


def save_folder(engine: Engine, recipe: Recipe, path: Path, dtype: torch.dtype) -> None:
    """Let all ranks write their shards beside ``path``, of which rank 0 makes the folder. A collective.

    Args:
        engine: Holds this rank's part.
        recipe: Model, and where tokenizer files are.
        path: New folder on a file system that all ranks share.
        dtype: Of the files.

    Raises:
        UserInputError: It cannot be written, or is there already.
    """
    shards = path.with_name(f"{path.name}.shards-{on_rank_zero(os.getpid)}")
    try:
        on_rank_zero(lambda: _refuse_taken(path))
        save({item.name: item.weight for item in engine.parameters}, checkpoint_id=shards)
        on_rank_zero(lambda: _write(shards, recipe, path, dtype))
    except AgreedError as error:
        raise UserInputError(f"{path} was not written: {error}", hint="choose a new folder with enough space") from None
    finally:
        shutil.rmtree(shards, ignore_errors=True)


def _refuse_taken(path: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists already")


def _write(shards: Path, recipe: Recipe, path: Path, dtype: torch.dtype) -> None:
    with new_folder(path) as partial:
        export_data(shards, recipe, partial, dtype=dtype)
