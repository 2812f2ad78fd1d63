"""A run folder on this host and its ranks as bare child processes, without a launcher that would end them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.plan.fixed import fixed_pipeline, fixed_plan
from hpjob.plan.model import ParallelDegrees
from hpjob.recipe.data_files import TokenFilesMeta
from hpjob.recipe.load import dump_recipe
from hpjob.recipe.model import Recipe

_VOCAB = 512
_ROOT = Path(__file__).resolve().parent.parent


@dataclass
class LocalRun:
    """A run whose ranks all share one node, each with a GPU of its own."""

    dir: RunDir
    recipe: Recipe

    @classmethod
    def create(cls, folder: Path, *, steps: int, save_every: int, zero_stage: int) -> LocalRun:
        """Write token files and the recipe of a small Llama in fp32."""
        recipe = Recipe.model_validate(
            {
                "name": "small",
                "model": {
                    "num_hidden_layers": 4,
                    "hidden_size": 64,
                    "intermediate_size": 128,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 4,
                    "vocab_size": _VOCAB,
                },
                "data": {"path": str(_write_tokens(folder / "data")), "seq_length": 64},
                "training": {"global_batch_size": 8, "steps": steps},
                "optimizer": {"lr": 1e-3, "warmup_steps": 2},
                "parallel": {"precision": "fp32", "zero_stage": zero_stage, "enable_jit_fused": False},
                "checkpoint": {"every_steps": save_every},
            }
        )
        run = cls(RunDir(folder / "run"), recipe)
        run.dir.path.mkdir()
        run.dir.recipe.write_text(dump_recipe(recipe))
        return run

    def start(self, degrees: ParallelDegrees) -> Attempt:
        """Begin an attempt on a mesh."""
        index = len(self.dir.attempt_list())
        attempt = self.dir.attempt(index)
        attempt.path.mkdir(parents=True)
        world = degrees.world_size
        attempt.hosts.write_text("local-0\n" * world)
        attempt.attempt_json.write_text(json.dumps({"index": index, "master_addr": "127.0.0.1", "world_size": world}))
        pipeline = fixed_pipeline(self.recipe, degrees, num_microbatches=8 // degrees.dp, microbatch_size=1)
        attempt.plan.write_text(fixed_plan(self.recipe, degrees, pipeline).model_dump_json())
        return Attempt(attempt, [self._rank(attempt, rank) for rank in range(world)])

    def losses(self) -> dict[int, float]:
        """Return the loss of every step so far."""
        if not self.dir.metrics.exists():
            return {}
        lines = self.dir.metrics.read_text().splitlines(keepends=True)
        return {row["step"]: row["loss"] for row in (json.loads(line) for line in lines if line.endswith("\n"))}

    def _rank(self, attempt: AttemptDir, rank: int) -> subprocess.Popen[bytes]:
        variables = {"HPJOB_RANK": rank, "HPJOB_LOCAL_RANK": rank, "HPJOB_NODE_NAME": "local-0", "OMP_NUM_THREADS": 1}
        environment = {**os.environ, **{key: str(value) for key, value in variables.items()}}
        environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "hpjob.runtime", "--run-dir", str(self.dir.path)]
        with attempt.rank_log(rank).open("wb") as log:
            return subprocess.Popen(
                [*command, "--attempt-dir", str(attempt.path)], stdout=log, stderr=log, env=environment
            )


@dataclass
class Attempt:
    """One start of the ranks."""

    dir: AttemptDir
    ranks: list[subprocess.Popen[bytes]]

    def wait(self, seconds: float) -> list[int | None]:
        """Wait for all ranks and return their exit codes; None = it had to be killed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(rank.poll() is None for rank in self.ranks):
            time.sleep(0.05)
        codes = [rank.poll() for rank in self.ranks]
        self.kill()
        return codes

    def kill(self) -> None:
        """End all ranks."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()

    def events(self, name: str) -> list[Mapping[str, Any]]:
        """Return the events of a kind that rank 0 wrote."""
        lines = self.dir.events.read_text().splitlines() if self.dir.events.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def failures(self) -> dict[str, str]:
        """Return why each failed rank says it failed."""
        found = {path.stem: json.loads(path.read_text()) for path in self.dir.failures.glob("rank-*.json")}
        return {name: f"{failure['kind']}: {failure['message'][:200]}" for name, failure in found.items()}


def _write_tokens(folder: Path) -> Path:
    folder.mkdir(parents=True)
    generator = np.random.default_rng(7)
    count = 20_000
    noise = generator.integers(0, _VOCAB, count)
    tokens = np.where(generator.random(count) < 0.2, noise, np.arange(count) * 7 % _VOCAB).astype("<u2").tobytes()
    (folder / "tokens.bin").write_bytes(tokens)
    meta = TokenFilesMeta(
        dtype="uint16",
        num_tokens=count,
        num_documents=1,
        vocab_size=_VOCAB,
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
