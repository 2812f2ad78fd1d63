"""Whole runs on real GPUs: a checkpoint of one mesh loaded by another, and what happens when a rank dies."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from tests.support.run_folder import Attempt, Run, small_recipe, write_tokens

_MESHES: tuple[dict[str, int], ...] = ({"tp": 2}, {"pp": 2}, {"dp": 2}, {})
_STEPS, _SAVED = 12, 6


class OneHostRun(Run):
    """All ranks on one node, each with a GPU of its own."""

    def _begin(self, tp: int, pp: int, dp: int) -> Attempt:
        attempt = super()._begin(tp, pp, dp)
        attempt.dir.hosts.write_text("local-0\n" * (tp * pp * dp))
        return attempt


def checkpoint_across_meshes(folder: Path) -> list[dict[str, Any]]:
    """Train on one mesh, go back to a saved step and train on from there on each other mesh.

    Returns:
        For every mesh the largest relative difference of its losses after the saved step.
    """
    recipe = small_recipe(
        write_tokens(folder / "data"),
        training=dict(steps=_STEPS),
        checkpoint=dict(every_steps=_SAVED),
        parallel=dict(zero_stage=3, enable_jit_fused=False),
    )
    run = OneHostRun.create(folder / "run", recipe)
    results = []
    expected: dict[int, float] = {}
    for mesh in _MESHES:
        if expected:
            _go_back(run)
        attempt = run.start(**mesh)
        codes = attempt.wait()
        losses = dict(run.losses())
        name = " ".join(f"{axis}{size}" for axis, size in mesh.items()) or "one GPU"
        if codes != [0] * len(codes) or len(losses) != _STEPS:
            results.append({"mesh": name, "ok": False, "reason": f"exit codes {codes}: {attempt.log()[-1500:]}"})
            continue
        resumed = [event for event in attempt.events() if event["event"] == "resumed"]
        expected = expected or losses
        difference = max(abs(losses[s] - loss) / abs(loss) for s, loss in expected.items())
        results.append(
            {
                "mesh": name,
                "resumed_from": resumed[0]["saved_by_plan"] if resumed else None,
                "loss_rel": difference,
                "ok": difference < 1e-5 and bool(resumed) == (len(results) > 0),
            }
        )
    return results


def kill_one_rank(folder: Path) -> dict[str, Any]:
    """Kill rank 1 of 2 in the middle of training; return how long rank 0 took to end, and why it says it did."""
    recipe = small_recipe(
        write_tokens(folder / "data"), training=dict(steps=1_000_000), parallel=dict(enable_jit_fused=False)
    )
    attempt = OneHostRun.create(folder / "run", recipe).start(dp=2)
    try:
        attempt.wait_for_step(3)
        killed = time.monotonic()
        attempt.signal(signal.SIGKILL, rank=1)
        code = attempt.ranks[0].wait(timeout=90)
        seconds = time.monotonic() - killed
    finally:
        attempt.kill()
    reasons = {rank: f"{failure['kind']}: {failure['message'][:200]}" for rank, failure in attempt.failures().items()}
    return {"seconds": seconds, "exit_code": code, "failures": reasons, "ok": seconds < 30 and code != 0}


def _go_back(run: Run) -> None:
    """Make the run look as if it had ended at the saved step."""
    run.dir.finished.unlink()
    newest = run.dir.checkpoint(_STEPS)
    newest.rename(newest.with_name(f"set-aside-{time.monotonic_ns()}"))
