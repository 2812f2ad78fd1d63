"""Whole runs on real GPUs: a checkpoint of one mesh loaded by another, and what happens when a rank dies."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.local_run import LocalRun
from hpjob.plan.model import ParallelDegrees

_MESHES = {
    "tp2": ParallelDegrees(tp=2),
    "pp2": ParallelDegrees(pp=2),
    "dp2": ParallelDegrees(dp=2),
    "one GPU": ParallelDegrees(),
}
_STEPS, _SAVED = 12, 6
_PATIENCE_S = 60.0


def checkpoint_across_meshes(folder: Path) -> list[dict[str, Any]]:
    """Train on one mesh, go back to a saved step and train on from there on each other mesh.

    Returns:
        For every mesh the largest relative difference of its losses after the saved step.
    """
    run = LocalRun.create(folder, steps=_STEPS, save_every=_SAVED, zero_stage=3)
    results: list[dict[str, Any]] = []
    expected: dict[int, float] = {}
    for name, degrees in _MESHES.items():
        if expected:
            _go_back(run)
        attempt = run.start(degrees)
        codes = attempt.wait(_PATIENCE_S)
        losses = run.losses()
        if any(codes) or None in codes or len(losses) != _STEPS:
            log = attempt.dir.rank_log(0).read_text()[-1500:]
            results.append({"mesh": name, "ok": False, "reason": f"exit codes {codes}: {log}"})
            continue
        resumed = attempt.events("resumed")
        is_first = not expected
        expected = expected or losses
        difference = max(abs(losses[step] - loss) / abs(loss) for step, loss in expected.items())
        results.append(
            {
                "mesh": name,
                "resumed_from": resumed[0]["saved_by_plan"] if resumed else None,
                "loss_rel": difference,
                "ok": difference < 1e-5 and bool(resumed) != is_first,
            }
        )
    return results


def kill_one_rank(folder: Path) -> dict[str, Any]:
    """Kill rank 1 of 2 in the middle of training; return how long rank 0 took to end, and why it says it did."""
    run = LocalRun.create(folder, steps=1_000_000, save_every=1_000_000, zero_stage=1)
    attempt = run.start(ParallelDegrees(dp=2))
    deadline = time.monotonic() + _PATIENCE_S
    while len(run.losses()) < 3 and time.monotonic() < deadline and attempt.ranks[0].poll() is None:
        time.sleep(0.05)
    steps = len(run.losses())
    attempt.ranks[1].kill()
    killed = time.monotonic()
    while attempt.ranks[0].poll() is None and time.monotonic() < killed + _PATIENCE_S:
        time.sleep(0.05)
    seconds = time.monotonic() - killed
    code = attempt.ranks[0].poll()
    attempt.kill()
    return {
        "steps": steps,
        "seconds": seconds,
        "exit_code": code,
        "failures": attempt.failures(),
        "ok": steps >= 3 and bool(code) and seconds < 30,
        "reason": "" if steps >= 3 else attempt.dir.rank_log(0).read_text()[-1500:],
    }


def _go_back(run: LocalRun) -> None:
    """Make the run look as if it had ended at the saved step."""
    run.dir.finished.unlink()
    newest = run.dir.checkpoint(_STEPS)
    newest.rename(newest.with_name(f"set-aside-{time.monotonic_ns()}"))
