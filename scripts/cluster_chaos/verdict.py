"""What has to be left of a run after a fault: everything that an undisturbed one leaves, and nothing more."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from cluster_chaos.victim import STEPS, Victim, load_lines
from hpjob.core.run_dir import RunDir
from hpjob.core.run_records import read_json

CLEAN_UP_S = 300.0
"""srun waits 60 s for a rank whose step daemon is gone, after the others have left."""
_LEFTOVERS = ("**/.*.tmp", "checkpoints/*.partial", "checkpoints/*.trash", "attempts/.draft-*", "STOP")


def problems_of(victim: Victim, undisturbed: RunDir, committed: int, attempts_before: int) -> list[str]:
    """Return what is wrong with a run; empty = it survived.

    Args:
        victim: The run.
        undisturbed: The same run without a fault.
        committed: Step of the newest complete checkpoint when the fault came.
        attempts_before: Attempts that had begun then.
    """
    if not victim.over():
        return [f"not finished: {victim.describe()}"]
    found = _steps(victim.run) + _differences(victim, undisturbed)
    later = victim.run.attempt_list()[attempts_before:]
    for attempt in later:
        begun = read_json(attempt.attempt_json) or {}
        if int(begun.get("checkpoint_step", -1)) < committed:
            found.append(f"attempt {attempt.index} began at {begun.get('checkpoint_step')}, saved was {committed}")
    return found + _left_over(victim)


def _steps(run: RunDir) -> list[str]:
    try:
        steps = [line["step"] for line in load_lines(run.metrics)]
    except json.JSONDecodeError as error:
        return [f"metrics.jsonl has a torn line: {error}"]
    return [] if steps == list(range(1, STEPS + 1)) else [f"steps are missing or doubled: {steps}"]


def _differences(victim: Victim, undisturbed: RunDir) -> list[str]:
    if victim.site.quick:
        lines, states = (
            [
                [(line["step"], line["loss"]) for line in load_lines(run.metrics)]
                if name == "metrics"
                else (run.checkpoint(STEPS) / "state").read_text()
                for run in (victim.run, undisturbed)
            ]
            for name in ("metrics", "state")
        )
        return [f"{name} differ" for name, pair in (("metrics", lines), ("weights", states)) if pair[0] != pair[1]]
    # Imported late: torch, which quick runs do without.
    from compare_runs import compare_checkpoints, compare_metrics

    found = {
        "metrics": compare_metrics(victim.run, undisturbed),
        "weights": compare_checkpoints(victim.run, undisturbed),
    }
    return [f"{what}: {difference}" for what, difference in found.items() if difference]


def _left_over(victim: Victim) -> list[str]:
    """What should have gone by itself within a while."""
    end = time.monotonic() + CLEAN_UP_S
    while left := _in_queue(victim) + _processes(victim.run.path) + _files(victim.run.path):
        if time.monotonic() > end:
            return left
        time.sleep(0.5)
    return []


def _in_queue(victim: Victim) -> list[str]:
    lines = victim.site.run("squeue", "-h", "-n", victim.name, "-o", "job %i is still %T", check=False)
    return lines.splitlines()


def _files(folder: Path) -> list[str]:
    return [f"left over: {path.relative_to(folder)}" for pattern in _LEFTOVERS for path in folder.glob(pattern)]


def _processes(folder: Path) -> list[str]:
    """Processes that name the folder, have it open or work in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                continue
            command = (entry / "cmdline").read_bytes()
            texts = [command, *(os.fsencode(link.readlink()) for link in (entry / "fd").iterdir())]
        except OSError:
            continue
        if any(os.fsencode(folder) in text for text in texts):
            found.append(
                f"process {entry.name} is left: {command.replace(bytes(1), b' ').decode(errors='replace')[:120]}"
            )
    return found
