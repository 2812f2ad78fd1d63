"""The demo: prepare data, submit, preempt half-way, resume, check, summarise.

Everything goes through the ``hpjob`` command as a person would type it; only the preemption is played, by the signal
that Slurm sends. Exit code 0 only if every check holds.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from hpjob.plan.model import Plan

CORPUS = Path("corpus/python-library")
CORPUS_MB = 8
RUNS = Path("runs")
TIME_LIMIT_S = 1200.0
LEAST_FALL = 0.5  # nats; an untrained model stays within 0.1
SPARKS = "▁▂▃▄▅▆▇█"


class DemoError(Exception):
    """The demo cannot go on."""


@dataclass(frozen=True)
class Run:
    """Files of the run that the demo reads."""

    path: Path

    def metrics(self) -> list[dict[str, Any]]:
        """Complete lines of metrics.jsonl, one a step."""
        try:
            text = (self.path / "metrics.jsonl").read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def attempt_files(self, name: str) -> list[dict[str, Any]]:
        """One JSON file of every attempt that has it, oldest first."""
        return [json.loads(path.read_text()) for path in sorted(self.path.glob(f"attempts/[0-9]*/{name}"))]

    def plan(self) -> Plan:
        return Plan.model_validate_json((self.path / "plan.json").read_text())


def hpjob(*arguments: str | Path) -> None:
    """Run an hpjob command, shown as one would type it.

    Raises:
        DemoError: It failed; its messages are on the terminal already.
    """
    command = ["hpjob", *map(str, arguments)]
    print(f"\n$ {shlex.join(command)}", flush=True)
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        raise DemoError(f"`{shlex.join(command)}` exited with {code}")


def prepare_corpus() -> None:
    """Make token files of the sources of Python's own library, once."""
    if (CORPUS / "meta.json").exists():
        print(f"{CORPUS} is there already")
        return
    sources = sysconfig.get_path("stdlib")
    hpjob("data", "prepare", sources, "--suffix", ".py", "--limit-mb", str(CORPUS_MB), "--out", CORPUS)


def submit() -> Run:
    """Start the run on this machine, in a folder of its own."""
    run = next(run for run in (Run(RUNS / f"demo-{number:03d}") for number in count(1)) if not run.path.exists())
    hpjob(
        *("submit", "--nodes", "2", "--recipe", "tiny", "--set", f"data.path={CORPUS}"),
        *("--name", run.path.name, "--executor", "local", "--yes"),
    )
    return run


def status(run: Run) -> dict[str, Any]:
    """Where the run stands, as ``hpjob status --json`` says it."""
    done = subprocess.run(
        ["hpjob", "status", run.path.name, "--json"], stdout=subprocess.PIPE, text=True, check=True, timeout=120
    )
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def watch_and_preempt(run: Run, total_steps: int) -> None:
    """Show progress until the run ends; half-way, tell it to stop as Slurm would.

    Raises:
        DemoError: It took too long, or ended before it could be stopped.
    """
    until = time.monotonic() + TIME_LIMIT_S
    command = ["hpjob", "status", run.path.name, "--watch"]
    print(f"\n$ {shlex.join(command)}", flush=True)
    preempted = False
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        try:
            while watching.poll() is None:
                if time.monotonic() > until:
                    raise DemoError(f"not finished after {TIME_LIMIT_S:.0f} s")
                if not preempted and len(run.metrics()) >= total_steps // 2:
                    preempt(run)
                    preempted = True
                time.sleep(0.2)
            print(watching.stdout.read() if watching.stdout else "")
        finally:
            watching.terminate()
    if not preempted:
        raise DemoError("the run ended before its first half was done")


def preempt(run: Run) -> None:
    """Send the launcher what Slurm sends the ranks of a preempted job."""
    pid = int(run.attempt_files("launcher.json")[-1]["pid"])
    print(f"\n-- preemption: kill -USR2 {pid} (the launcher of attempt 0)", file=sys.stderr)
    os.kill(pid, signal.SIGUSR2)


def check(run: Run, total_steps: int) -> bool:
    """Print what had to hold and whether it did."""
    metrics = run.metrics()
    steps = [line["step"] for line in metrics]
    outcomes = [(document["kind"], document["step"]) for document in run.attempt_files("outcome.json")]
    losses = [line["loss"] for line in metrics]
    few = max(1, len(losses) // 10)
    begin, end = (sum(part) / few for part in (losses[:few], losses[-few:])) if losses else (0.0, 0.0)
    resumed = [line["step"] for line in metrics if line["attempt"] == 1]
    checks = [
        ("saved and left when told to stop", [kind for kind, _ in outcomes] == ["preempted", "finished"]),
        ("went on at the very next step", bool(resumed) and resumed[0] == outcomes[0][1] + 1),
        (f"steps 1 to {total_steps}, none twice, none missing", steps == list(range(1, total_steps + 1))),
        (f"loss fell from {begin:.3f} to {end:.3f}", end < begin - LEAST_FALL),
        ("finished, by `hpjob status`", status(run)["state"] == "finished"),
    ]
    print()
    for text, holds in checks:
        print(f"  {'ok    ' if holds else 'FAILED'}  {text}")
    return all(holds for _, holds in checks)


def summarise(run: Run) -> None:
    """Print plan, loss curve, speed and where everything is."""
    metrics = run.metrics()
    # The first step of an attempt warms up.
    firsts = {line["attempt"]: line["step"] for line in reversed(metrics)}
    steady = [line for line in metrics if line["step"] not in firsts.values()]
    tokens_per_s = sum(line["tokens"] for line in steady) / sum(line["step_time_s"] for line in steady)
    losses = [line["loss"] for line in metrics]
    print(f"\nplan      {run.plan().summary}")
    print(f"loss      {losses[0]:.3f} {sparkline(losses)} {losses[-1]:.3f}   ({len(losses)} steps)")
    print(f"speed     {tokens_per_s:,.0f} tokens/s on 8 ranks of this machine's CPUs")
    print(f"run       {run.path.absolute()}")
    for name, what in (
        ("plan.json", "degrees, placement of every rank, memory, time, reasons"),
        ("job.sbatch", "the same run on a cluster: sbatch job.sbatch"),
        ("metrics.jsonl", "one line a step"),
        ("attempts/", "hosts, events and a log of every rank for each start"),
        ("checkpoints/", "weights, optimizer, data position; loads on any layout"),
    ):
        print(f"  {name:<14}  {what}")


def sparkline(values: list[float], width: int = 60) -> str:
    """Draw values as one line of bars; each bar is the mean of its share."""
    bars = min(width, len(values))
    bounds = [index * len(values) // bars for index in range(bars + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((mean - low) * scale)] for mean in means)


def show(*arguments: str | Path) -> None:
    """Run an hpjob command for what it prints; its failure changes nothing any more."""
    subprocess.run(["hpjob", *map(str, arguments)], check=False)


def main() -> int:
    """Run the demo and return its exit code."""
    run: Run | None = None
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        prepare_corpus()
        run = submit()
        total_steps = int(status(run)["total_steps"])
        watch_and_preempt(run, total_steps)
        ok = check(run, total_steps)
        summarise(run)
        return 0 if ok else 1
    except DemoError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        if run is not None:
            show("cancel", run.path.name, "--yes")
            show("status", run.path.name)
            show("logs", run.path.name)
        return 1
    except KeyboardInterrupt:
        if run is not None:
            show("cancel", run.path.name, "--yes")
        return 130


if __name__ == "__main__":
    sys.exit(main())
