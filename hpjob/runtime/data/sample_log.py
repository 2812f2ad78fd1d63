"""Which samples each data-parallel rank trained on, step by step: proof that a run sees every token once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hpjob.core.run_dir import AttemptDir


class SampleLog:
    """Appends one line a step; flushed, so that it outlives a kill of the process.

    Args:
        attempt: Its folder gets the file.
        dp_rank: Whose samples these are.
    """

    def __init__(self, attempt: AttemptDir, dp_rank: int) -> None:
        self.path = sample_log_path(attempt, dp_rank)

    def append(self, step: int, samples: Sequence[int]) -> None:
        """Write the samples of a step (1-based), in the order in which they are trained on."""
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, "samples": list(samples)}) + "\n")


def sample_log_path(attempt: AttemptDir, dp_rank: int) -> Path:
    """Return the file of one data-parallel rank."""
    return attempt.path / f"samples-{dp_rank:05d}.jsonl"
