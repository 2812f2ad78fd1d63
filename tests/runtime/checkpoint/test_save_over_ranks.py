"""The exchange of several ranks during a save, each a thread of this process over one store."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime's tests need the [train] extra")

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from hpjob.core.run_dir import RunDir
from hpjob.runtime.checkpoint import notes as notes_module
from hpjob.runtime.checkpoint import save as save_module
from hpjob.runtime.checkpoint.folder import CheckpointFolder
from hpjob.runtime.checkpoint.listing import list_checkpoints
from hpjob.runtime.checkpoint.notes import SaveNotes
from hpjob.runtime.checkpoint.retention import Retention
from hpjob.runtime.checkpoint.save import BackgroundSave, Position, SaveResult, SaveTask
from hpjob.runtime.checkpoint.shards import ShardPlan, plan_locally, plan_whole
from tests.runtime.checkpoint.conftest import PLAN, flip_byte

WORLD = 3


class Ranks:
    """Ranks that each hold a tensor of their own and a copy of a shared one."""

    def __init__(self, path: Path) -> None:
        self.run = RunDir(path)
        self.folder = CheckpointFolder(self.run)
        self.states = [{f"own.{rank}": torch.full((50,), rank), "shared": torch.ones(7)} for rank in range(WORLD)]
        planners = [DefaultSavePlanner() for _ in range(WORLD)]
        local = [plan_locally(planners[rank], self.states[rank], rank) for rank in range(WORLD)]
        plans, metadata = plan_whole(planners[0], local)
        self.shards = [ShardPlan(planners[rank], plans[rank], None if rank else metadata) for rank in range(WORLD)]
        self.store = dist.HashStore()
        self.saves = 0

    def save(
        self, step: int, *, urgent: bool = False, absent: int | None = None, broken: int | None = None, **task: Any
    ) -> list[SaveResult]:
        """Save on all ranks; one may be absent, or have no tensors."""
        self.saves += 1
        base = SaveTask(
            rank=0,
            world_size=WORLD,
            device=torch.device("cpu"),
            folder=self.folder,
            position=Position(step=step, num_samples=step, lr=0.0, attempt=0),
            kind="permanent",
            plan=PLAN,
            fingerprint={},
            retention=Retention(keep_last=1),
            urgent=urgent,
            make_durable=lambda: None,
        )
        saves = []
        for rank in range(WORLD):
            tensors = self.shards[rank].tensors(self.states[rank])
            given = MemoryError("no room") if rank == broken else tensors
            notes = SaveNotes(self.store, self.saves, 600.0)
            saves.append(BackgroundSave(replace(base, rank=rank, **task), self.shards[rank], given, notes))
        present = [save for rank, save in enumerate(saves) if rank != absent]
        for save in present:
            save.start()
        return [save.result() for save in present]

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.path.iterdir())


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


def test_all_ranks_hear_the_same_and_each_byte_is_written_once(ranks: Ranks) -> None:
    results = ranks.save(1)
    assert all(result == results[0] and result.error is None for result in results)
    (entry,) = list_checkpoints(ranks.run, verify=True)
    assert entry.state == "complete" and entry.manifest
    files = [file.name for file in entry.manifest.files]
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    state = {name: torch.zeros_like(tensor) for part in ranks.states for name, tensor in part.items()}
    with pytest.warns(UserWarning, match="single process"):
        load(state, storage_reader=FileSystemReader(entry.path / "data"), no_dist=True)
    assert all(bool((state[f"own.{rank}"] == rank).all()) for rank in range(WORLD)) and bool(
        (state["shared"] == 1).all()
    )
    sizes = {file.name: file.size_bytes for file in entry.manifest.files}
    assert sum(size > 2200 for name, size in sizes.items() if name.startswith("__")) == 1, (
        "the shared one is in one file"
    )


def test_the_old_one_goes_after_the_new_one_was_read_back_and_stays_when_time_is_short(ranks: Ranks) -> None:
    ranks.save(1)
    assert ranks.save(2)[0].deleted == (1,)
    assert ranks.save(3, urgent=True)[0].deleted == ()
    assert ranks.names() == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize("rank", range(WORLD))
def test_a_failure_on_one_rank_is_one_on_all(ranks: Ranks, rank: int) -> None:
    ranks.save(1)
    results = ranks.save(2, broken=rank)
    assert all(f"rank {rank}: MemoryError: no room" in str(result.error) for result in results)
    assert ranks.names() == ["step-00000001"]
    assert ranks.save(3)[1].error is None
    assert ranks.names() == ["step-00000003"]


def test_a_rank_that_does_not_answer_ends_the_save_not_the_others(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is over as soon as the others have written, however long that takes them."""
    ranks.save(1)
    original = save_module.write_shards
    written: list[Any] = []

    def write_shards(*args: Any) -> Any:
        written.append(original(*args))
        return written[-1]

    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600 * (len(written) == 2), sleep=time.sleep)
    monkeypatch.setattr(save_module, "write_shards", write_shards)
    monkeypatch.setattr(notes_module, "time", later)
    results = ranks.save(2, absent=2)
    assert all(result.error is not None for result in results)
    assert "no answer in time" in str(results[0].error)
    assert ranks.names() == ["step-00000001"]


def test_damage_that_only_another_rank_sees_keeps_the_old_one(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.save(1)
    original = save_module.write_shards

    def write_shards(data: Path, *rest: Any) -> Any:
        written = original(data, *rest)
        if written.files[0].name.startswith("__1"):
            flip_byte(data / written.files[0].name, 300)
        return written

    monkeypatch.setattr(save_module, "write_shards", write_shards)
    results = ranks.save(2)
    assert all("__1_0.distcp has another checksum" in str(result.error) for result in results)
    assert ranks.names() == ["step-00000001", "step-00000002.damaged"]


def test_records_that_cannot_be_made_durable_forbid_the_checkpoint(ranks: Ranks) -> None:
    def make_durable() -> None:
        raise OSError("metrics cannot be written")

    failing: Callable[[], None] = make_durable
    assert "metrics cannot be written" in str(ranks.save(1, make_durable=failing)[2].error)
    assert ranks.names() == []
