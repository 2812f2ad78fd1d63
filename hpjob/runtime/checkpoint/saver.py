"""Starts saves: agrees on shards, copies the state where training is to go on, and hands over to a thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpjob.plan.model import Plan
from hpjob.recipe.model import CheckpointSettings
from hpjob.runtime.agreement import on_every_rank
from hpjob.runtime.checkpoint.folder import CheckpointFolder
from hpjob.runtime.checkpoint.manifest import Kind, Scalar
from hpjob.runtime.checkpoint.notes import SaveNotes, Store
from hpjob.runtime.checkpoint.random_state import random_state
from hpjob.runtime.checkpoint.retention import Retention
from hpjob.runtime.checkpoint.save import BackgroundSave, Position, SaveResult, SaveTask, Tensors
from hpjob.runtime.checkpoint.shards import ShardPlan
from hpjob.runtime.checkpoint.staging import Staging, missing_bytes, staging_bytes
from hpjob.runtime.checkpoint.state import STEP_KEY, SavedState, step_tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveParts:
    """What all saves of an attempt share.

    Attributes:
        store: A connection that only saves use.
        ranks_on_node: They share the host memory that staging takes.
        timeout_s: Bound on a whole save.
        make_durable: See :class:`hpjob.runtime.checkpoint.save.SaveTask`.
    """

    folder: CheckpointFolder
    engine: SavedState
    plan: Plan
    fingerprint: dict[str, Scalar]
    settings: CheckpointSettings
    store: Store
    device: torch.device
    ranks_on_node: int
    timeout_s: float
    make_durable: Callable[[], None]


class Saver:
    """Saves of one attempt, one at a time.

    Attributes:
        staged_bytes: Host memory that this rank's copies take; 0 until the first asynchronous save.
        shortage_bytes: By how much the host memory of some node is too small for copies; saves then wait.
    """

    def __init__(self, parts: SaveParts) -> None:
        self._parts = parts
        self._staging = Staging()
        self._shards: ShardPlan | None = None
        self._save: BackgroundSave | None = None
        self._number = 0
        self.staged_bytes = 0
        self.shortage_bytes = 0

    @property
    def running(self) -> bool:
        """Whether a save of this rank has not ended yet."""
        return self._save is not None and self._save.running

    def start(self, position: Position, kind: Kind, *, staged: bool, urgent: bool = False) -> float:
        """Begin a save of the state as it is; the one before must have been collected on all ranks.

        Args:
            position: Where training stands.
            kind: Of the checkpoint.
            staged: Copy the state first, if there is room; else it must not change before :meth:`collect` returns.
            urgent: See :class:`hpjob.runtime.checkpoint.save.SaveTask`.

        Returns:
            Seconds for which training stood still.

        Raises:
            AgreedError: The ranks' states do not fit together.
        """
        began = time.perf_counter()
        parts = self._parts
        state: dict[str, Any] = {
            **parts.engine.state_dict(),
            **random_state(dist.get_rank()),
            STEP_KEY: step_tensor(position.step),
        }
        if self._shards is None:
            self._shards = self._agree(state)
        task = SaveTask(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            device=parts.device,
            folder=parts.folder,
            position=position,
            kind=kind,
            plan=parts.plan,
            fingerprint=parts.fingerprint,
            retention=Retention.of(parts.settings),
            urgent=urgent,
            make_durable=parts.make_durable,
        )
        self._number += 1
        notes = SaveNotes(parts.store, self._number, parts.timeout_s)
        tensors = self._tensors(self._shards, state, staged=staged and not self.shortage_bytes)
        self._save = BackgroundSave(task, self._shards, tensors, notes)
        self._save.start()
        return time.perf_counter() - began

    def collect(self) -> SaveResult | None:
        """Wait for the save that was started and return how it went; None if there is none."""
        if self._save is None:
            return None
        result = self._save.result()
        self._save = None
        return result

    def _agree(self, state: dict[str, Any]) -> ShardPlan:
        """Plan over all ranks, and see whether copies fit into memory everywhere."""
        shards = ShardPlan.agree(state)
        if self._parts.settings.asynchronous:
            needed = staging_bytes(shards.tensors(state))
            self.shortage_bytes = max(on_every_rank(lambda: missing_bytes(needed, self._parts.ranks_on_node)))
            self.staged_bytes = 0 if self.shortage_bytes else needed
        return shards

    def _tensors(self, shards: ShardPlan, state: dict[str, Any], *, staged: bool) -> Tensors | Exception:
        """Return what the thread writes; a failure on this rank alone travels with the save to all."""
        try:
            live = shards.tensors(state)
            if staged:
                return self._staging.copy(live)
            if self._parts.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            return live
        except Exception as error:
            return error
