"""A run folder written by hand and its ranks as child processes: the runtime without any launcher."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np

from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.plan.fixed import fixed_pipeline, fixed_plan
from hpjob.plan.model import ParallelDegrees, Plan
from hpjob.recipe.data_files import TokenFilesMeta
from hpjob.recipe.load import dump_recipe
from hpjob.recipe.model import Recipe

# Real processes with everything imported once: a rank starts in milliseconds instead of seconds.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["hpjob.runtime.session", "hpjob.runtime.launch"])
Fault = Callable[[int], None]

VOCAB = 512
PATIENCE_S = 240.0
"""For things that take seconds on a machine with nothing else to do."""


def write_tokens(folder: Path, num_tokens: int = 20_000, vocab_size: int = VOCAB, seed: int = 7) -> Path:
    """Write token files with some structure, so that a model can learn from them."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    noise = generator.integers(0, vocab_size, num_tokens)
    ramp = np.arange(num_tokens) * 7 % vocab_size
    tokens = np.where(generator.random(num_tokens) < 0.2, noise, ramp).astype("<u2").tobytes()
    (folder / "tokens.bin").write_bytes(tokens)
    meta = TokenFilesMeta(
        dtype="uint16",
        num_tokens=num_tokens,
        num_documents=1,
        vocab_size=vocab_size,
        eos_token="<|endoftext|>",
        eos_token_id=0,
        sources=("made",),
        source_bytes=1,
        source_sha256="0" * 64,
        settings={},
        tokens_sha256=hashlib.sha256(tokens).hexdigest(),
        tokenizer_sha256="0" * 64,
    )
    (folder / "meta.json").write_text(meta.model_dump_json())
    return folder


def small_recipe(data: Path, **sections: dict[str, Any]) -> Recipe:
    """Return a small Llama; ``sections`` change values by section."""
    document: dict[str, dict[str, Any]] = {
        "model": dict(
            num_hidden_layers=4,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCAB,
            max_position_embeddings=64,
        ),
        "data": dict(path=str(data), seq_length=64),
        "training": dict(global_batch_size=8, steps=12),
        "optimizer": dict(lr=1e-3, warmup_steps=2),
        "parallel": dict(precision="fp32"),
        "checkpoint": dict(every_steps=100),
    }
    for section, values in sections.items():
        document[section] = document.get(section, {}) | values
    return Recipe.model_validate({"name": "small", **document})


def make_plan(recipe: Recipe, *, tp: int = 1, pp: int = 1, dp: int = 1) -> Plan:
    """Return a plan with microbatches of one sequence, and the recipe's schedule."""
    degrees, parallel = ParallelDegrees(tp=tp, pp=pp, dp=dp), recipe.parallel
    pipeline = fixed_pipeline(
        recipe,
        degrees,
        num_microbatches=recipe.training.global_batch_size // dp,
        microbatch_size=1,
        style="1f1b" if parallel.pp_style == "auto" else parallel.pp_style,
        num_model_chunks=1 if parallel.num_model_chunks == "auto" else parallel.num_model_chunks,
    )
    return fixed_plan(recipe, degrees, pipeline)


@dataclass
class Attempt:
    """One start of the ranks of a run."""

    dir: AttemptDir
    ranks: list[ForkServerProcess] = field(default_factory=list)

    def wait(self) -> list[int | None]:
        """Wait for all ranks and return their exit codes (-n = signal n); those that do not end are killed."""
        deadline = time.monotonic() + PATIENCE_S
        for rank in self.ranks:
            rank.join(timeout=max(0.0, deadline - time.monotonic()))
        codes = [rank.exitcode for rank in self.ranks]
        self.kill()
        return codes

    def kill(self) -> None:
        for rank in self.ranks:
            if rank.exitcode is None:
                rank.kill()
                rank.join()

    def signal(self, number: signal.Signals, rank: int = 0) -> None:
        os.kill(self.ranks[rank].pid or 0, number)

    def wait_for_event(self, name: str) -> dict[str, Any]:
        """Wait until rank 0 has written an event."""
        return self._wait_for(lambda: next((e for e in self.events() if e["event"] == name), None), name)

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is in the metrics."""
        metrics = RunDir(self.dir.path.parent.parent).metrics
        self._wait_for(lambda: any(line["step"] >= step for line in read_lines(metrics)) or None, f"step {step}")

    def events(self) -> list[dict[str, Any]]:
        return read_lines(self.dir.events)

    def event_names(self) -> list[str]:
        return [event["event"] for event in self.events()]

    def outcome(self) -> dict[str, Any]:
        return json.loads(self.dir.outcome.read_text())

    def failures(self) -> dict[int, dict[str, Any]]:
        found = [json.loads(path.read_text()) for path in sorted(self.dir.failures.glob("rank-*.json"))]
        return {failure["rank"]: failure for failure in found}

    def log(self, rank: int = 0) -> str:
        return self.dir.rank_log(rank).read_text()

    def _wait_for(self, found: Any, what: str) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while (result := found()) is None:
            if all(rank.exitcode is not None for rank in self.ranks) and found() is None:
                raise AssertionError(f"ranks ended before {what}:\n{self.log()}")
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"no {what} in time:\n{self.log()}")
            time.sleep(0.02)
        return result


@dataclass
class Run:
    """A run folder made by hand."""

    dir: RunDir
    recipe: Recipe

    @classmethod
    def create(cls, path: Path, recipe: Recipe) -> Run:
        path.mkdir(parents=True)
        (path / "recipe.yaml").write_text(dump_recipe(recipe))
        return cls(RunDir(path), recipe)

    def start(
        self, *, tp: int = 1, pp: int = 1, dp: int = 1, env: dict[str, str] | None = None, fault: Fault | None = None
    ) -> Attempt:
        """Start all ranks, on two virtual nodes where there is more than one rank.

        Args:
            tp: Degree.
            pp: Degree.
            dp: Degree.
            env: More variables.
            fault: Called with the rank in each process before the runtime starts.
        """
        attempt = self.begin(tp=tp, pp=pp, dp=dp)
        for rank in range(tp * pp * dp):
            variables = {**rank_env(attempt.dir, rank), **(env or {})}
            process = FORKSERVER.Process(
                target=_be_rank, args=(self.dir.path, attempt.dir.path, rank, variables, fault)
            )
            process.start()
            attempt.ranks.append(process)
        return attempt

    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.dir.metrics)

    def losses(self) -> list[tuple[int, float]]:
        return [(line["step"], line["loss"]) for line in self.metrics()]

    def checkpoint_names(self) -> list[str]:
        return sorted(path.name for path in self.dir.checkpoints.iterdir()) if self.dir.checkpoints.is_dir() else []

    def begin(self, *, tp: int = 1, pp: int = 1, dp: int = 1) -> Attempt:
        """Make the folder of the next attempt and start nothing."""
        world = tp * pp * dp
        index = len(self.dir.attempt_list())
        attempt = self.dir.attempt(index)
        attempt.path.mkdir(parents=True)
        per_node = max(1, world // 2)
        attempt.hosts.write_text("".join(f"local-{rank // per_node}\n" for rank in range(world)))
        attempt.attempt_json.write_text(json.dumps({"index": index, "master_addr": "127.0.0.1", "world_size": world}))
        attempt.plan.write_text(make_plan(self.recipe, tp=tp, pp=pp, dp=dp).model_dump_json())
        return Attempt(attempt)


def rank_env(attempt: AttemptDir, rank: int) -> dict[str, str]:
    """Return the variables that a launcher sets for a rank."""
    hosts = attempt.hosts.read_text().split()
    return {
        "HPJOB_RANK": str(rank),
        "HPJOB_LOCAL_RANK": str(hosts[:rank].count(hosts[rank])),
        "HPJOB_NODE_NAME": hosts[rank],
        "OMP_NUM_THREADS": "1",
    }


def _be_rank(run: Path, attempt: Path, rank: int, env: dict[str, str], fault: Fault | None) -> None:
    os.environ.update(env)
    log = os.open(AttemptDir(attempt).rank_log(rank), os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch

    from hpjob.runtime.launch import main
    from hpjob.runtime.signals import StopRequest

    torch.set_num_threads(1)  # imported before OMP_NUM_THREADS was set
    stop = StopRequest()
    stop.install()
    if fault is not None:
        fault(rank)
    main(["--run-dir", str(run), "--attempt-dir", str(attempt)], stop)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSON-lines file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
