"""How soon a rank that hangs is named in the default setting, for every kind of hang.

    python -m benchmarks.hangs [--out benchmarks/results/hangs.json]

Two CPU ranks a kind, all kinds at once; rank 0 holds the store, so it has rows of its own. The time runs from the last
thing that was done (a step, or an event of set-up) until the failure record is written.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from hpjob.core.run_records import first_failure, read_failures
from tests.support.faults import (
    Fault,
    before_step,
    block_data,
    block_save,
    block_set_up,
    keep_interpreter_lock,
    sleep_on,
    stop_self,
)
from tests.support.run_folder import Attempt, Run, small_recipe, write_tokens

STEP = 6
KINDS: dict[str, tuple[Fault, int]] = {
    "sleep": (before_step(sleep_on, rank=1, step=STEP), 1),
    "sleep of rank 0": (before_step(sleep_on, rank=0, step=STEP), 0),
    "set-up: sleep": (partial(block_set_up, at_rank=1), 1),
    "first step: sleep": (before_step(sleep_on, rank=1, step=1), 1),
    "save: sleep": (partial(block_save, at_rank=1, step=STEP), 1),
    "data never come": (partial(block_data, at_rank=1, step=STEP), 1),
    "C code with Python's lock": (before_step(keep_interpreter_lock, rank=1, step=STEP), 1),
    "C code with Python's lock, rank 0": (before_step(keep_interpreter_lock, rank=0, step=STEP), 0),
    "stopped": (before_step(stop_self, rank=1, step=STEP), 1),
    "stopped, rank 0": (before_step(stop_self, rank=0, step=STEP), 0),
}
PATIENCE_S = 600.0
"""Includes the start of all ranks on a busy machine."""


def main() -> None:
    """Run all kinds and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = write_tokens(Path(folder) / "tokens")
        started = []
        for number, (kind, (fault, _)) in enumerate(KINDS.items()):
            # Training waits for saves, so that the time of the one that hangs is known.
            checkpoint = {"every_steps": STEP if kind.startswith("save") else 100, "asynchronous": False}
            run = Run.create(Path(folder) / f"run-{number}", small_recipe(data, checkpoint=checkpoint))
            started.append((run, run.start(dp=2, fault=fault)))
        rows = [
            _measure(kind, rank, run, attempt)
            for (kind, (_, rank)), (run, attempt) in zip(KINDS.items(), started, strict=True)
        ]
    if options.out:
        options.out.write_text(json.dumps({"version": 1, "rows": rows}, indent=2) + "\n", encoding="utf-8")


def _measure(kind: str, rank: int, run: Run, attempt: Attempt) -> dict[str, Any]:
    """Wait until the rank that does not hang has left, and say what it found."""
    attempt.ranks[1 - rank].join(timeout=PATIENCE_S)
    attempt.kill()
    failure = first_failure(read_failures(attempt.dir))
    named = failure is not None and failure.kind == "hang" and failure.rank == rank
    last = max([line["time"] for line in run.metrics()] + [event["time"] for event in attempt.events()], default=0.0)
    seconds = round(failure.time - last, 1) if failure is not None and named else None
    print(f"{kind:36} {'not named' if seconds is None else f'{seconds} s'}")
    return {"kind": kind, "rank": rank, "named_after_s": seconds, "message": failure.message if failure else None}


if __name__ == "__main__":
    main()
