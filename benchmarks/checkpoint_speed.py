"""What saving costs: the stall of an asynchronous save beside a synchronous one and ``torch.save``; bytes per second.

    python -m benchmarks.checkpoint_speed --folder /scratch --output benchmarks/results/checkpoint_speed.json

All write the same tensors to the same file system and force them to the disk; the plain file copy too. One process, so
nothing of it is waiting for other ranks. Medians of several rounds, in which the ways take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from hpjob.core.run_dir import RunDir
from hpjob.plan.fixed import fixed_pipeline, fixed_plan
from hpjob.plan.model import ParallelDegrees
from hpjob.recipe.load import load_recipe
from hpjob.recipe.model import CheckpointSettings
from hpjob.runtime.checkpoint.folder import CheckpointFolder
from hpjob.runtime.checkpoint.save import Position, SaveResult
from hpjob.runtime.checkpoint.saver import SaveParts, Saver

MIB = 2**20
_TOUCHED_BYTES = 2**32


class State:
    """Tensors of 16 MiB, on the GPU where there is one."""

    def __init__(self, size_mib: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.tensors = {
            f"layers.{number}.weight": torch.randn(4 * MIB, generator=generator, device=device)
            for number in range(max(1, size_mib // 16))
        }

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is loaded here."""


def make_saver(folder: Path, state: State, device: torch.device) -> Saver:
    """Return a saver that keeps one checkpoint."""
    recipe, degrees = load_recipe("tiny", []), ParallelDegrees()
    return Saver(
        SaveParts(
            folder=CheckpointFolder(RunDir(folder)),
            engine=state,
            plan=fixed_plan(recipe, degrees, fixed_pipeline(recipe, degrees, num_microbatches=1, microbatch_size=1)),
            fingerprint={},
            settings=CheckpointSettings(keep_last=1),
            store=dist.HashStore(),
            device=device,
            ranks_on_node=1,
            timeout_s=3600,
            make_durable=lambda: None,
        )
    )


class Ways:
    """The ways to be compared; each call returns seconds."""

    def __init__(self, folder: Path, size_mib: int) -> None:
        self.device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        self.state = State(size_mib, self.device)
        self._folder = folder
        self._saver = make_saver(folder, self.state, self.device)
        self._step = 0

    def asynchronous(self) -> tuple[float, SaveResult]:
        """Return the stall, and the result that comes later."""
        _settle()
        stall_s = self._start(staged=True)
        return stall_s, self._collect()

    def synchronous(self) -> tuple[float, SaveResult]:
        """Return the seconds until everything is written, published, read back and the old one deleted."""
        _settle()
        began = time.perf_counter()
        self._start(staged=False)
        result = self._collect()
        return time.perf_counter() - began, result

    def torch_save(self) -> float:
        """Write the same tensors with torch.save."""
        path = self._folder / "plain.pt"

        def work() -> None:
            with path.open("wb") as stream:
                torch.save(self.state.tensors, stream)
                stream.flush()
                os.fsync(stream.fileno())

        return _timed(work, path)

    def copy(self) -> float:
        """Copy a file of as many bytes, which is in the page cache."""
        source, target = self._folder / "source", self._folder / "copy"
        if not source.exists():
            source.write_bytes(os.urandom(MIB) * (self.state.size_bytes // MIB))
        source.read_bytes()

        def work() -> None:
            shutil.copyfile(source, target)
            with target.open("rb") as stream:
                os.fsync(stream.fileno())

        return _timed(work, target)

    def _start(self, *, staged: bool) -> float:
        self._step += 1
        position = Position(step=self._step, num_samples=0, lr=0.0, attempt=0)
        return self._saver.start(position, "permanent", staged=staged)

    def _collect(self) -> SaveResult:
        result = self._saver.collect()
        if result is None or result.error:
            raise RuntimeError(f"the save failed: {result}")
        return result


def _settle() -> None:
    """Give every way the same start: deleted files are gone, and the host has backed the memory of the page cache.

    On a virtual machine the first touch of memory that was never used costs several times what writing costs.
    """
    os.sync()
    torch.ones(_TOUCHED_BYTES, dtype=torch.uint8)
    os.sync()


def _timed(work: Callable[[], None], path: Path) -> float:
    _settle()
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


def measure(folder: Path, size_mib: int, rounds: int) -> dict[str, Any]:
    """Return medians, and how they compare."""
    ways = Ways(folder, size_mib)
    first_stall_s, _ = ways.asynchronous()
    stalls, published, waits, plain, copies = [], [], [], [], []
    for _ in range(rounds):
        stall_s, result = ways.asynchronous()
        stalls.append(stall_s)
        published.append(result.duration_s)
        waits.append(ways.synchronous()[0])
        plain.append(ways.torch_save())
        copies.append(ways.copy())
    size_gib = ways.state.size_bytes / 2**30
    seconds = {
        "first_asynchronous_stall_s": first_stall_s,
        "asynchronous_stall_s": median(stalls),
        "asynchronous_until_published_s": median(published),
        "synchronous_s": median(waits),
        "torch_save_s": median(plain),
        "file_copy_s": median(copies),
    }
    return {
        "size_gib": size_gib,
        "device": ways.device.type,
        "host": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "rounds": rounds,
        **{name: round(value, 4) for name, value in seconds.items()},
        "published_gib_per_s": round(size_gib / median(published), 3),
        "file_copy_gib_per_s": round(size_gib / median(copies), 3),
        "stall_to_synchronous": round(median(a / b for a, b in zip(stalls, waits, strict=True)), 4),
        "stall_to_torch_save": round(median(a / b for a, b in zip(stalls, plain, strict=True)), 4),
        "speed_to_file_copy": round(median(c / p for c, p in zip(copies, published, strict=True)), 3),
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the file system to measure (default: a temporary one)")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoint-speed-") as folder:
        record = measure(Path(folder), options.size_mib, options.rounds)
    dist.destroy_process_group()
    text = json.dumps(record, indent=2) + "\n"
    print(text, end="")
    if options.output:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
