"""A rank that fails inside a pipeline step ends all ranks, with its traceback."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime's tests need the [train] extra")

from hpjob.core.run_records import first_failure, read_failures
from tests.support.run_folder import Run, small_recipe, write_tokens

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("style", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_a_fault_in_the_middle_of_a_step_ends_all_ranks(tmp_path: Path, style: str, chunks: int) -> None:
    parallel = {"pp_style": style, "num_model_chunks": chunks}
    run = Run.create(tmp_path / "run", small_recipe(write_tokens(tmp_path / "data"), parallel=parallel))
    attempt = run.start(pp=2, tp=2, fault=partial(fail_in_backward, 3))
    codes = attempt.wait()
    assert all(code not in (0, None, -9) for code in codes)
    failures = read_failures(attempt.dir)
    first = first_failure(failures)
    assert first is not None
    assert (first.rank, first.kind, first.step, first.message) == (3, "exception", 2, "a made-up fault")
    assert "in fail_at_the_third" in (first.traceback or "")
    # At once, by the loss of it: neither a hang nor a time-out that was waited for.
    others = [failure for failure in failures if failure.rank != 3]
    assert [(failure.rank, failure.kind) for failure in sorted(others, key=lambda failure: failure.rank)] == [
        (rank, "peer-lost") for rank in range(3)
    ]
    assert not any("timed out" in failure.message.lower() for failure in others)


def fail_in_backward(wanted_rank: int, rank: int) -> None:
    """Let the third backward pass of the second step fail on one rank."""
    from hpjob.runtime.pipeline.executor import PipelineExecutor

    backward = PipelineExecutor._backward
    run = PipelineExecutor.run
    counts = {"step": 0, "backward": 0}

    def counting_run(self: PipelineExecutor, *args: Any) -> Any:
        counts.update(step=counts["step"] + 1, backward=0)
        return run(self, *args)

    def fail_at_the_third(self: PipelineExecutor, action: Any) -> None:
        counts["backward"] += 1
        if (rank, counts["step"], counts["backward"]) == (wanted_rank, 2, 3):
            raise ValueError("a made-up fault")
        backward(self, action)

    PipelineExecutor.run = counting_run  # type: ignore[method-assign]
    PipelineExecutor._backward = fail_at_the_third  # type: ignore[method-assign]
