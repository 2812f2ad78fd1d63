"""A rank that stops without ending: noticed by all, named with its stack, whatever it hangs in."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from hpjob.core.run_records import first_failure, read_failures
from tests.support.faults import Fault, before_step, block_data, keep_interpreter_lock, sleep_on, stop_self
from tests.support.run_folder import PATIENCE_S, Run, small_recipe, write_tokens

pytestmark = pytest.mark.distributed
SOON = {"HPJOB_HANG_FLOOR_S": "8"}
LATER = {"HPJOB_HANG_FLOOR_S": "25"}
"""Late enough for the missing signs of life to be seen first, as in the default setting."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("made") / "data")


@pytest.mark.parametrize(
    ("fault", "rank", "words", "stack"),
    [
        (before_step(sleep_on, rank=2, step=6), 2, "in sleep_on", "in sleep_on"),
        (partial(block_data, at_rank=3, step=6), 3, "(reading data)", "in rows"),
        (before_step(keep_interpreter_lock, rank=0, step=6), 0, "kept Python from running", "in keep_interpreter_lock"),
        (before_step(stop_self, rank=3, step=6), 3, "no sign of life", None),
    ],
    ids=["sleep", "data", "lock of rank 0", "stopped"],
)
def test_a_rank_that_hangs_is_named(
    tmp_path: Path, data: Path, fault: Fault, rank: int, words: str, stack: str | None
) -> None:
    # Ranks that hang may take a save in the background with them: here each is over before training goes on.
    run = Run.create(tmp_path / "run", small_recipe(data, checkpoint={"every_steps": 2, "asynchronous": False}))
    attempt = run.start(tp=2, pp=2, fault=fault, env=SOON if stack_at_once(words) else LATER)
    others = [process for number, process in enumerate(attempt.ranks) if number != rank]
    for process in others:
        process.join(timeout=PATIENCE_S)
    assert all(process.exitcode not in (0, None, -9) for process in others), attempt.log()
    attempt.kill()
    first = first_failure(read_failures(attempt.dir))
    assert first is not None
    assert (first.rank, first.node, first.kind) == (rank, f"local-{rank // 2}", "hang")
    assert words in first.message
    assert stack is None or stack in (first.traceback or "")
    assert stack is None or stack.removeprefix("in ") in attempt.log(rank)
    assert run.checkpoint_names()[-1] == "step-00000004"


def stack_at_once(words: str) -> bool:
    """Whether the watcher's thread of the rank that hangs still runs, so that it can say where it is."""
    return words not in {"kept Python from running", "no sign of life"}
