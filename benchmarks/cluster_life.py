#!/usr/bin/env python3
"""How long a stop and a start take on the Slurm sandbox: signal to safe exit, requeue to first step.

    benchmarks/cluster_life.py [--runs 5] [--out FILE]

Tiny runs of two ranks are preempted by REQUEUE with a grace time of 60 s while they train. All nodes share this
machine, so importing torch is most of a start; the sandbox lets a requeued job start again after 6 s, a cluster after
about two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]

from cluster_chaos.corpus import write_corpus  # noqa: E402  (needs the path above)
from cluster_chaos.faults import preempt  # noqa: E402
from cluster_chaos.site import Site  # noqa: E402
from cluster_chaos.victim import Victim, write_recipe  # noqa: E402

from hpjob.core.run_records import read_json, read_json_lines, read_outcome  # noqa: E402

PATIENCE_S = 900.0
WORDS = {
    "signal_to_exit_s": "preemption asked to ranks saved and gone",
    "exit_to_decision_s": "ranks gone to the job's decision",
    "queued_s": "decision to the next attempt's begin (Slurm)",
    "begin_to_first_step_s": "begin of the attempt to its first step",
}


def measure(victim: Victim) -> dict[str, float]:
    """Preempt a run once and return the seconds of each part.

    Raises:
        RuntimeError: It did not do what was expected in time.
    """
    victim.submit()
    if not victim.wait(lambda: victim.step() >= 10, PATIENCE_S) or victim.over():
        raise RuntimeError(f"it does not train: {victim.describe()}")
    first = victim.run.attempt(0)
    at = time.time()
    preempt(victim, random.Random(0))
    second = victim.run.attempt(1)
    if not victim.wait(victim.over, PATIENCE_S):
        raise RuntimeError(f"it did not finish: {victim.describe()}")
    outcome, end, begun = read_outcome(first), read_json(first.end), read_json(second.attempt_json)
    if outcome is None or outcome.time is None or end is None or begun is None:
        raise RuntimeError(f"it finished before it was preempted: {victim.describe()}")
    first_step = next(line["time"] for line in read_json_lines(second.events) if line.get("event") == "first-step")
    return {
        "signal_to_exit_s": outcome.time - at,
        "exit_to_decision_s": end["time"] - outcome.time,
        "queued_s": begun["started_at"] - end["time"],
        "begin_to_first_step_s": first_step - begun["started_at"],
    }


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description="Times of a preemption and of the start after it.")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hpjob-life-") as folder:
        base = Path(folder)
        site = Site(base / "s", nodes=2)
        os.environ["SLURM_CONF"] = site.environment["SLURM_CONF"]
        write_corpus(base / "corpus")
        write_recipe(base, base / "corpus")
        try:
            site.up()
            rows = [measure(Victim(site, base, f"life-{number}", "long")) for number in range(options.runs)]
        finally:
            site.down()
    print(f"{'':46} {'median':>8} {'least':>8} {'most':>8}   ({len(rows)} runs)")
    for name, words in WORDS.items():
        values = [row[name] for row in rows]
        print(f"{words:46} {statistics.median(values):6.1f} s {min(values):6.1f} s {max(values):6.1f} s")
    if options.out is not None:
        options.out.write_text(json.dumps({"version": 1, "cpus": os.cpu_count(), "runs": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
