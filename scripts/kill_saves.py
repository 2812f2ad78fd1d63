#!/usr/bin/env python3
"""SIGKILLs a process again and again while it saves a checkpoint and deletes the one before.

    scripts/kill_saves.py --kills 300

Kills are spread evenly over the duration of a whole save. After each the next process resumes as a run does: the
newest complete checkpoint must pass its checksums, and every tensor must be what was saved at that step. The last
line reads ``N of N kills survived``; exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from hpjob.core.run_dir import RunDir
from hpjob.plan.fixed import fixed_pipeline, fixed_plan
from hpjob.plan.model import ParallelDegrees
from hpjob.recipe.load import load_recipe
from hpjob.recipe.model import CheckpointSettings
from hpjob.runtime.checkpoint.folder import CheckpointFolder
from hpjob.runtime.checkpoint.load import find_checkpoint, load_checkpoint
from hpjob.runtime.checkpoint.save import Position
from hpjob.runtime.checkpoint.saver import SaveParts, Saver

UNDISTURBED = 4
"""Saves that tell how long one takes."""


class State:
    """Tensors whose content is a function of the step."""

    def __init__(self, size_mib: float) -> None:
        elements = max(1, int(size_mib * 2**20 / 4 / 8))
        self.tensors = {f"layers.{number}.weight": torch.empty(elements) for number in range(8)}

    def fill(self, step: int) -> None:
        """Change all tensors in place."""
        for number, tensor in enumerate(self.tensors.values()):
            tensor.normal_(generator=torch.Generator().manual_seed(1000 * step + number))

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Everything was filled in place."""

    def is_that_of(self, step: int, size_mib: float) -> bool:
        """Tell whether all tensors are what a step makes them."""
        expected = State(size_mib)
        expected.fill(step)
        return all(torch.equal(tensor, expected.tensors[name]) for name, tensor in self.tensors.items())


def resume(folder: CheckpointFolder, state: State, size_mib: float) -> int:
    """Do what a restarted run does and check what it gets; return the step.

    Raises:
        RuntimeError: A checkpoint is damaged, or holds something else than was saved.
    """
    folder.clean_leftovers()
    damage: list[str] = []
    manifest = find_checkpoint(folder, {}, lambda step, problem: damage.append(f"step {step}: {problem}"))
    if damage:
        raise RuntimeError(f"damaged: {damage}")
    if manifest is None:
        return 0
    load_checkpoint(folder, manifest, state)
    if not state.is_that_of(manifest.step, size_mib):
        raise RuntimeError(f"the checkpoint of step {manifest.step} holds something else than was saved")
    return manifest.step


def save(folder: CheckpointFolder, state: State, step: int, begun: Callable[[], None]) -> None:
    """Save a step, go on changing the state as training does, and wait for the end of the save."""
    recipe = load_recipe("tiny", [])
    degrees = ParallelDegrees()
    settings = CheckpointSettings(keep_last=1)
    saver = Saver(
        SaveParts(
            folder=folder,
            engine=state,
            plan=fixed_plan(recipe, degrees, fixed_pipeline(recipe, degrees, num_microbatches=1, microbatch_size=1)),
            fingerprint={},
            settings=settings,
            store=dist.HashStore(),
            device=torch.device("cpu"),
            ranks_on_node=1,
            timeout_s=600,
            make_durable=lambda: None,
        )
    )
    position = Position(step=step, num_samples=step, lr=0.0, attempt=0)
    begun()
    saver.start(position, "permanent", staged=True)
    state.fill(step + 1)
    result = saver.collect()
    if result is None or result.error or result.cleanup_error:
        raise RuntimeError(f"save of step {step}: {result}")


def process(root: Path, size_mib: float, notify: int, *, only_resume: bool) -> None:
    """One life of a run: resume, say so, save the next step."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = CheckpointFolder(RunDir(root))
    state = State(size_mib)
    step = resume(folder, state, size_mib)
    os.write(notify, b"%d\n" % step)
    if only_resume:
        return
    state.fill(step + 1)
    save(folder, state, step + 1, lambda: os.write(notify, b"begun\n") and None)
    os.write(notify, b"end\n")


def live(root: Path, size_mib: float, kill_after_s: float | None, *, only_resume: bool = False) -> tuple[int, float]:
    """Fork a process, kill it while it saves if asked to.

    Returns:
        The step that it resumed from, and the seconds from the beginning of its save to its end.

    Raises:
        RuntimeError: It failed by itself.
    """
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(source)
            process(root, size_mib, sink, only_resume=only_resume)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(sink)
    with os.fdopen(source) as lines:
        first = lines.readline()
        begun = lines.readline()
        started = time.perf_counter()
        if begun and kill_after_s is not None:
            time.sleep(kill_after_s)
            os.kill(pid, signal.SIGKILL)
        lines.read()
        duration = time.perf_counter() - started
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if not first or (status and not killed):
        raise RuntimeError("the process failed by itself")
    return int(first), duration


def left_behind(root: Path, step: int) -> str:
    """Return in words how far a save of ``step`` had come."""
    folder = CheckpointFolder(RunDir(root))
    names = {path.name for path in folder.path.iterdir()} if folder.path.is_dir() else set()
    if any(name.endswith(".trash") for name in names):
        return "old one half deleted"
    if folder.complete(step).name in names:
        return "new one complete, old one there" if len(names) > 1 else "new one complete, old one gone"
    if folder.partial(step).name in names:
        parts = {path.name for path in folder.partial(step).iterdir()}
        data = {path.name for path in (folder.partial(step) / "data").iterdir()} if "data" in parts else set()
        if "manifest.json" in parts:
            return "manifest written, no name yet"
        return "shards written" if ".metadata" in data else "writing shards" if data else "folder made"
    return "nothing written yet"


def run(root: Path, kills: int, size_mib: float) -> int:
    """Kill ``kills`` times; return how many were survived."""
    whole_s = max(live(root, size_mib, None)[1] for _ in range(UNDISTURBED))
    print(f"a whole save takes {1e3 * whole_s:.0f} ms; {kills} kills are spread over it", flush=True)
    phases: Counter[str] = Counter()
    survived, step = 0, UNDISTURBED
    for number in range(kills):
        try:
            live(root, size_mib, whole_s * (number + 0.5) / kills)
            phases[left_behind(root, step + 1)] += 1
            found, _ = live(root, size_mib, None, only_resume=True)
        except RuntimeError as error:
            print(f"kill {number}: {error}", flush=True)
            return survived
        if found not in (step, step + 1):
            print(f"kill {number}: resumed at step {found} instead of {step} or {step + 1}", flush=True)
            return survived
        step, survived = found, survived + 1
    for phase, count in phases.most_common():
        print(f"{count:5}  {phase}")
    return survived


def main() -> int:
    """Run and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--size-mib", type=float, default=4.0, help="of the state (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="on the file system to try (default: a temporary one)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="kill-saves-") as root:
        survived = run(Path(root), options.kills, options.size_mib)
    print(f"{survived} of {options.kills} kills survived")
    return 0 if survived == options.kills else 1


if __name__ == "__main__":
    sys.exit(main())
