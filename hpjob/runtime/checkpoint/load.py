"""Finds the newest checkpoint that holds what its manifest says, and loads it into any mesh."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from hpjob.core.errors import EnvironmentProblemError, UserInputError
from hpjob.runtime.agreement import on_every_rank, on_rank_zero
from hpjob.runtime.checkpoint.folder import CheckpointFolder
from hpjob.runtime.checkpoint.manifest import DATA_NAME, Manifest, Scalar, check_file, differences
from hpjob.runtime.checkpoint.random_state import restore_random_state, saved_random_state
from hpjob.runtime.checkpoint.state import STEP_KEY, SavedState, step_tensor

OnDamage = Callable[[int, str], None]
"""Told the step and what is wrong with its checkpoint."""


def find_checkpoint(folder: CheckpointFolder, fingerprint: dict[str, Scalar], on_damage: OnDamage) -> Manifest | None:
    """Return the newest checkpoint that verifies, setting damaged ones aside. A collective.

    Raises:
        UserInputError: The checkpoint belongs to another model, optimizer, seed or data.
        AgreedError: The folder cannot be read or changed.
    """
    for step in on_rank_zero(folder.steps):
        manifest = on_rank_zero(lambda step=step: _read(folder, step))  # type: ignore[misc]
        if isinstance(manifest, Manifest):
            _refuse_other_training(folder, manifest, fingerprint)
            problem = _verify(folder, manifest)
            if problem is None:
                return manifest
        else:
            problem = manifest
        on_damage(step, problem)
        on_rank_zero(lambda step=step: folder.set_aside(step))  # type: ignore[misc]
    return None


def load_checkpoint(folder: CheckpointFolder, manifest: Manifest, engine: SavedState) -> None:
    """Load a verified checkpoint into the engine and the random generators. A collective.

    Raises:
        EnvironmentProblemError: Its content does not match its manifest or this model.
    """
    data = folder.complete(manifest.step) / DATA_NAME
    reader = FileSystemReader(data)
    names = reader.read_metadata().state_dict_metadata.keys()
    state = engine.state_dict()
    random = saved_random_state(dist.get_rank(), names)
    progress = {STEP_KEY: step_tensor(0)}
    missing = sorted(state.keys() - names)
    if missing:
        raise EnvironmentProblemError(
            f"checkpoint step {manifest.step} lacks {len(missing)} entries of this model, such as {missing[0]}",
            hint=f"it was written by hpjob {manifest.hpjob_version}; resume with that version",
        )
    load({**state, **random, **progress}, storage_reader=reader)
    if int(progress[STEP_KEY]) != manifest.step:
        raise EnvironmentProblemError(
            f"{data} holds step {int(progress[STEP_KEY])}, its manifest says {manifest.step}",
            hint="move this checkpoint away; the one before will be used",
        )
    engine.load_state_dict(state)
    restore_random_state(random)


def _read(folder: CheckpointFolder, step: int) -> Manifest | str:
    try:
        return folder.read(step)
    except (OSError, ValueError) as error:
        return f"manifest.json: {error}"


def _verify(folder: CheckpointFolder, manifest: Manifest) -> str | None:
    """Check size and checksum of every file, each by one rank; return what is wrong, or None."""
    data = folder.complete(manifest.step) / DATA_NAME
    own = manifest.files[dist.get_rank() :: dist.get_world_size()]
    found = on_every_rank(lambda: [problem for file in own if (problem := check_file(data, file))])
    problems = [problem for part in found for problem in part]
    return "; ".join(problems[:3]) if problems else None


def _refuse_other_training(folder: CheckpointFolder, manifest: Manifest, fingerprint: dict[str, Scalar]) -> None:
    lines = differences(manifest.fingerprint, fingerprint)
    if lines:
        where = folder.complete(manifest.step)
        raise UserInputError(
            "\n".join(f"{where}: {line}" for line in lines),
            hint="the checkpoint belongs to another training; undo the change or start a run of a new name",
        )
