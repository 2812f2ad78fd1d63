"""Faults that a rank process gets before the runtime starts; each takes the rank as its argument."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Fault = Callable[[int], None]


def before_step(action: Callable[[], None], *, rank: int, step: int, after: Path | None = None) -> Fault:
    """Call ``action`` when a rank is about to do a step.

    Args:
        action: What to do.
        rank: Who does it.
        step: When.
        after: A path that has to exist first, such as the checkpoint that a background save is still making; the rank
            waits for it while the other ranks wait for the rank.
    """
    return partial(_before_step, action, rank, step, after)


def hold_before_step(gate: Path, *, rank: int, step: int) -> Fault:
    """Let training stand still before a step until ``gate`` exists, however fast it would have been over."""
    return before_step(_go_on, rank=rank, step=step, after=gate)


def kill_in_save(moment: str, *, rank: int, step: int) -> Fault:
    """SIGKILL a rank at one moment of saving a step; ``half written`` to ``old one renamed``."""
    return partial(_kill_in_save, moment, rank, step)


def fail_save(step: int, *, rank: int) -> Fault:
    """Let a rank's writes beyond a few kilobytes fail while a step is saved, as on a full disk."""
    return partial(_fail_save, step, rank)


def _go_on() -> None:
    """Do nothing."""


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error() -> None:
    raise ValueError("a made-up fault")


def stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_on() -> None:
    time.sleep(3600)


def keep_interpreter_lock() -> None:
    """Stay in a call into C that never lets another Python thread run."""
    ctypes.PyDLL(None).sleep(3600)


def block_data(rank: int, *, at_rank: int, step: int) -> None:
    """Let the data of a step never come."""
    from hpjob.runtime.data.tokens import TokenDataset

    original = TokenDataset.rows

    def rows(self: TokenDataset, wanted: int, *rest: Any) -> Any:
        if (rank, wanted) == (at_rank, step):
            threading.Event().wait()
        return original(self, wanted, *rest)

    TokenDataset.rows = rows  # type: ignore[method-assign]


def block_set_up(rank: int, *, at_rank: int) -> None:
    """Let the model of a rank never be built."""
    from hpjob.runtime.engine import Engine

    original = Engine.__init__

    def blocked(self: Engine, *arguments: Any) -> None:
        if rank == at_rank:
            sleep_on()
        original(self, *arguments)

    Engine.__init__ = blocked  # type: ignore[method-assign]


def block_save(rank: int, *, at_rank: int, step: int) -> None:
    """Let a rank's part of the checkpoint of a step never be written."""
    from hpjob.runtime.checkpoint import save as save_module

    original = save_module.write_shards

    def write_shards(data: Path, *rest: Any) -> Any:
        if rank == at_rank and f"step-{step:08d}." in str(data):
            sleep_on()
        return original(data, *rest)

    save_module.write_shards = write_shards


def broken_device(rank: int) -> None:
    """Let the preflight find rank 1's device broken."""
    from hpjob.runtime.health import preflight

    if rank == 1:
        preflight.check_device = lambda device: f"{device} does not work: uncorrectable ECC error"


def other_versions(rank: int) -> None:
    """Let rank 1 have another torch."""
    from hpjob.runtime.health import preflight

    original = preflight.versions
    if rank == 1:
        preflight.versions = lambda: {**original(), "torch": "1.0"}


def spoil_loss(rank: int, *, steps: tuple[int, ...], factor: float) -> None:
    """Multiply the loss of some steps and its gradients, also when they are done again."""
    from hpjob.runtime.engine import Engine

    train_step, accumulate = Engine.train_step, Engine.accumulate_gradients
    current = [0]

    def spoiled_step(self: Engine, batch: Any, step: int) -> Any:
        current[0] = step
        return train_step(self, batch, step)

    def spoiled(self: Engine, batch: Any) -> Any:
        loss, tokens = accumulate(self, batch)
        if current[0] not in steps:
            return loss, tokens
        for item in self.parameters:
            if item.local_gradient is not None:
                item.local_gradient.mul_(factor)
        return loss * factor, tokens

    Engine.train_step = spoiled_step  # type: ignore[method-assign]
    Engine.accumulate_gradients = spoiled  # type: ignore[method-assign]


def terminate_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _before_step(action: Callable[[], None], wanted_rank: int, wanted_step: int, after: Path | None, rank: int) -> None:
    from hpjob.runtime.engine import Engine

    original = Engine.train_step

    def train_step(self: Engine, batch: Any, step: int) -> Any:
        if (rank, step) == (wanted_rank, wanted_step):
            while after is not None and not after.exists():
                time.sleep(0.01)
            action()
        return original(self, batch, step)

    Engine.train_step = train_step  # type: ignore[method-assign]


def _fail_save(wanted_step: int, wanted_rank: int, rank: int) -> None:
    from hpjob.runtime.checkpoint import save as save_module

    original = save_module.write_shards
    if rank != wanted_rank:
        return

    def write_shards(data: Path, *rest: Any) -> Any:
        if f"step-{wanted_step:08d}." not in str(data):
            return original(data, *rest)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            return original(data, *rest)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    save_module.write_shards = write_shards


def _kill_in_save(moment: str, wanted_rank: int, wanted_step: int, rank: int) -> None:
    from hpjob.runtime.checkpoint import folder as folder_module
    from hpjob.runtime.checkpoint import save as save_module

    if rank != wanted_rank:
        return
    name = f"step-{wanted_step:08d}"

    def killing(module: Any, attribute: str, matches: Callable[..., bool], *, after: bool = False) -> None:
        original = getattr(module, attribute)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            hit = matches(*args)
            if hit and not after:
                kill_self()
            result = original(*args, **kwargs)
            if hit:
                kill_self()
            return result

        setattr(module, attribute, replacement)

    def in_partial(path: Any, *_: Any) -> bool:
        return f"{name}." in str(path) and ".partial" in str(path)

    sync, rmtree = (folder_module, "sync_folder"), (folder_module.shutil, "rmtree")
    moments: dict[str, Callable[[], None]] = {
        "half written": lambda: _kill_when_shard_is_half_written(save_module, name),
        "written": lambda: killing(save_module, "write_shards", in_partial, after=True),
        "manifest written": lambda: killing(*sync, in_partial),
        "before rename": lambda: killing(
            *sync, lambda path: path.name.startswith(name) and path.suffix == ".partial", after=True
        ),
        "after rename": lambda: killing(*sync, lambda path: (path / name).exists()),
        "old one renamed": lambda: killing(*rmtree, lambda path, *_: path.suffix == ".trash" and path.exists()),
    }
    moments[moment]()


def _kill_when_shard_is_half_written(save_module: Any, name: str) -> None:
    original = save_module.write_shards

    def write_shards(data: Path, *rest: Any) -> Any:
        if name in str(data):
            Path(data, f"__{os.environ['HPJOB_RANK']}_0.distcp").write_bytes(b"\0" * 1000)
            kill_self()
        return original(data, *rest)

    save_module.write_shards = write_shards
