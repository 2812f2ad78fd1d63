"""A process group of this process alone, and a small state to save in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime's tests need the [train] extra")

import torch
import torch.distributed as dist

from hpjob.core.run_dir import RunDir
from hpjob.core.run_records import read_json_lines
from hpjob.plan.fixed import fixed_pipeline, fixed_plan
from hpjob.plan.model import ParallelDegrees
from hpjob.recipe.model import CheckpointSettings, Recipe
from hpjob.runtime.checkpoint.folder import CheckpointFolder
from hpjob.runtime.checkpoint.keeper import CheckpointKeeper
from hpjob.runtime.checkpoint.load import find_checkpoint, load_checkpoint
from hpjob.runtime.checkpoint.save import Position
from hpjob.runtime.checkpoint.saver import SaveParts, Saver
from hpjob.runtime.rank import Rank
from hpjob.runtime.records import AttemptRecords

RECIPE = Recipe.model_validate(
    {
        "name": "small",
        "model": dict(
            num_hidden_layers=2,
            hidden_size=8,
            intermediate_size=8,
            num_attention_heads=1,
            num_key_value_heads=1,
            vocab_size=16,
        ),
        "data": dict(seq_length=8),
        "training": dict(global_batch_size=1, steps=100),
    }
)
PLAN = fixed_plan(
    RECIPE, ParallelDegrees(), fixed_pipeline(RECIPE, ParallelDegrees(), num_microbatches=1, microbatch_size=1)
)


class SmallState:
    """Tensors whose content tells the step."""

    def __init__(self, elements: int = 3000) -> None:
        self.tensors = {f"layer.{number}.weight": torch.zeros(elements) for number in range(3)}
        self.tensors["optimizer.step"] = torch.tensor(0)

    def train(self, step: int) -> None:
        """Change everything in place, as an optimizer does."""
        for number, tensor in enumerate(self.tensors.values()):
            tensor.copy_(torch.full_like(tensor, 10 * step + number))

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert all(state[name] is tensor for name, tensor in self.tensors.items())

    def holds(self, step: int) -> bool:
        expected = SmallState(self.tensors["layer.0.weight"].numel())
        expected.train(step)
        return all(torch.equal(tensor, expected.tensors[name]) for name, tensor in self.tensors.items())


class OneRank:
    """What the train loop has, without training: a state, a folder, records and the keeper."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.run = RunDir(path)
        self.attempt = self.run.attempt(len(self.run.attempt_list()))
        self.attempt.path.mkdir(parents=True)
        self.folder = CheckpointFolder(self.run)
        self.state = SmallState()
        checkpoint = CheckpointSettings(**settings)
        rank = Rank(
            rank=0,
            local_rank=0,
            hosts=("local-0",),
            node="local-0",
            master_addr="127.0.0.1",
            run_dir=self.run,
            attempt=self.attempt,
        )
        self.records = AttemptRecords(rank)
        self.saver = Saver(
            SaveParts(
                folder=self.folder,
                engine=self.state,
                plan=PLAN,
                fingerprint={},
                settings=checkpoint,
                store=dist.HashStore(),
                device=torch.device("cpu"),
                ranks_on_node=1,
                timeout_s=600,
                make_durable=self.records.sync_metrics,
            )
        )
        self.keeper = CheckpointKeeper(self.saver, checkpoint, self.records, 0, lambda step: None)

    def train(self, *steps: int) -> None:
        """Do steps and what the loop does at their ends."""
        for step in steps:
            self.state.train(step)
            if not self.keeper.running:
                self.keeper.collect()
            if self.keeper.is_due(step):
                self.keeper.save(self.position(step))

    def leave(self, step: int, *, last: bool = False) -> None:
        """Do what the loop does when it is told to stop."""
        if self.keeper.is_unsaved(step):
            self.keeper.save_now(self.position(step), last=last)

    def position(self, step: int) -> Position:
        return Position(step=step, num_samples=step, lr=0.1, attempt=self.attempt.index)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_json_lines(self.attempt.events) if event["event"] == name]

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.path.iterdir()) if self.folder.path.is_dir() else []

    def resume(self) -> int:
        """Load the newest checkpoint into a new state and return its step; 0 = there is none."""
        self.damage: list[str] = []
        manifest = find_checkpoint(self.folder, {}, lambda step, problem: self.damage.append(f"{step}: {problem}"))
        if manifest is None:
            return 0
        loaded = SmallState()
        load_checkpoint(self.folder, manifest, loaded)
        assert loaded.holds(manifest.step)
        return manifest.step


def flip_byte(path: Path, position: int) -> None:
    """Spoil one byte of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A default process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
