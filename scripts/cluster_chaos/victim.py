"""A tiny run on the sandbox: submitted as a person would, looked at from outside while it lives."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from cluster_chaos.site import Site
from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import newest_checkpoint_step, read_json, read_json_lines

STEPS = 120
_RECIPE = """\
version: 1
model:
  model_type: llama
  num_hidden_layers: 2
  hidden_size: 64
  intermediate_size: 128
  num_attention_heads: 4
  num_key_value_heads: 2
  vocab_size: 1024
  max_position_embeddings: 64
data:
  path: {corpus}
  seq_length: 64
training:
  global_batch_size: 8
  steps: {steps}
optimizer:
  lr: 2e-3
  warmup_steps: 10
parallel:
  tp_size: 1
  pp_size: 1
  sp_size: 1
  zero_stage: 1
  num_microbatches: 2
  microbatch_size: 2
  precision: fp32
  gradient_checkpoint_config:
    policy: none
checkpoint:
  every_steps: 25
job:
  gpus_per_node: 1
  cpus_per_rank: 1
"""


def write_recipe(folder: Path, corpus: Path) -> Path:
    """Write the recipe of all runs; two nodes with a rank each."""
    path = folder / "recipe.yaml"
    path.write_text(_RECIPE.format(corpus=corpus, steps=STEPS), encoding="utf-8")
    return path


@dataclass
class Victim:
    """One run.

    Attributes:
        site: Where it runs.
        folder: Working directory that has ``recipe.yaml``.
        name: Of the run.
        partition: Where it is submitted to.
    """

    site: Site
    folder: Path
    name: str
    partition: str
    notes: list[str] = field(default_factory=list)

    @property
    def run(self) -> RunDir:
        return RunDir(self.folder / "runs" / self.name)

    def hpjob(self, *arguments: str, tries: int = 5) -> str:
        """Run an ``hpjob`` command, again when the controller is just away for another run's sake."""
        for left in reversed(range(tries)):
            try:
                # What a run remembers of bad nodes is its own: chaos makes every node bad in the end.
                state = str(self.folder / "state" / self.name)
                return self.site.run(sys.executable, "-m", "hpjob", *arguments, cwd=self.folder, XDG_STATE_HOME=state)
            except RuntimeError as error:
                if not left or "controller" not in str(error).lower():
                    raise
                time.sleep(3)
        raise AssertionError("unreachable")

    def submit(self) -> None:
        words = ("--nodes", "2", "--recipe", "recipe.yaml", "--name", self.name, "--partition", self.partition)
        self.hpjob("submit", *words, "--time", "2h", "--yes", "--", "--exclusive")

    def resume(self) -> None:
        self.hpjob("resume", self.name, "--yes")

    @property
    def attempt(self) -> AttemptDir | None:
        attempts = self.run.attempt_list()
        return attempts[-1] if attempts else None

    @property
    def job_id(self) -> str:
        """Job of the newest attempt."""
        return str(self.begun()["job_id"])

    @property
    def nodes(self) -> list[str]:
        """Nodes of the newest attempt, rank 0's first."""
        return [str(name) for name in self.begun()["hostnames"]]

    def begun(self) -> dict[str, Any]:
        return (read_json(self.attempt.attempt_json) if self.attempt else None) or {}

    def step(self) -> int:
        """Newest step in ``metrics.jsonl``."""
        lines = read_json_lines(self.run.metrics)
        return int(lines[-1]["step"]) if lines else 0

    def checkpoint_step(self) -> int:
        return newest_checkpoint_step(self.run)

    def saving(self) -> bool:
        return any(self.run.checkpoints.glob("*.partial"))

    def over(self) -> bool:
        return self.run.finished.exists()

    def wait(self, condition: Callable[[], object], seconds: float) -> bool:
        """Wait for something of this run, or its end; return whether the condition holds."""
        self.site.until(lambda: condition() or self.over(), seconds)
        return bool(condition())

    def ranks(self) -> list[psutil.Process]:
        """Processes of the newest attempt's ranks, rank 0's node first."""
        path = str(self.attempt.path) if self.attempt else "?"
        found = self._processes(lambda words: "hpjob.runtime" in words and path in words and "srun" not in words[0])
        order = self.nodes
        places: dict[psutil.Process, int] = {}
        for process in found:
            with suppress(psutil.Error, ValueError):  # ended meanwhile, or of an attempt that began meanwhile
                places[process] = order.index(process.environ().get("SLURMD_NODENAME", order[0]))
        return sorted(places, key=lambda process: places[process])

    def srun(self) -> list[psutil.Process]:
        path = str(self.attempt.path) if self.attempt else "?"
        found = self._processes(lambda words: words[0].endswith("srun") and "hpjob.runtime" in words and path in words)
        # srun has a helper process, its child, which only cleans up.
        return [process for process in found if _parent(process) not in {other.pid for other in found}]

    def shell(self) -> list[psutil.Process]:
        """The job script."""
        job_id, sruns = self.job_id, self.srun()
        if sruns:
            with suppress(psutil.Error):
                parent = sruns[0].parent()
                return [parent] if parent is not None else []
        return self._processes(lambda words: len(words) > 1 and words[1].endswith(f"job{int(job_id):05d}/slurm_script"))

    def step_daemons(self) -> list[psutil.Process]:
        """slurmstepd above each rank."""
        found = []
        for process in self.ranks():
            with suppress(psutil.Error):
                parent = process.parent()
                if parent is not None and "slurmstepd" in " ".join(parent.cmdline()[:1]):
                    found.append(parent)
        return found

    def signal(self, processes: list[psutil.Process], number: signal.Signals) -> None:
        for process in processes:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                self.notes.append(f"process {process.pid} was gone already")

    def describe(self) -> str:
        """How the run stands, for a report of what went wrong."""
        parts = []
        for attempt in self.run.attempt_list():
            end = read_json(attempt.end) or {}
            parts.append(f"attempt {attempt.index}: {end.get('decision')}: {end.get('reason')}")
        parts.append(self.site.run("squeue", "-h", "-t", "all", "-n", self.name, "-o", "%i %T %r", check=False).strip())
        return "; ".join(parts)

    @staticmethod
    def _processes(matches: Callable[[list[str]], bool]) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"]
            if words and matches(words):
                found.append(process)
        return found


def _parent(process: psutil.Process) -> int | None:
    """Number of a process's parent; None when it has ended meanwhile."""
    try:
        return process.ppid()
    except psutil.Error:
        return None


def load_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON-lines file strictly: a torn line is an error here."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
