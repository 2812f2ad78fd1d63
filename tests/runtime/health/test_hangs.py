"""A rank that stops without ending: noticed by all, named with its stack, whatever it hangs in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest

from hpjob.core.run_records import first_failure, read_failures
from tests.support.faults import Fault, before_step, block_data, keep_interpreter_lock, sleep_on, stop_self
from tests.support.run_folder import PATIENCE_S, Attempt, Run, small_recipe, write_tokens

# One worker starts the runs of all these tests.
pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("hangs")]
SOON, LATER = "8", "25"
"""``HPJOB_HANG_FLOOR_S``; late enough for the missing signs of life to be seen first, as in the default setting."""


@dataclass(frozen=True)
class Hang:
    """How a rank hangs at step 6, and what is said of it; one that cannot say where it is leaves no stack."""

    fault: Fault
    rank: int
    floor_s: str
    words: str
    function: str | None


HANGS = {
    "lock of rank 0": Hang(
        before_step(keep_interpreter_lock, rank=0, step=6),
        0,
        LATER,
        "kept Python from running",
        "keep_interpreter_lock",
    ),
    "stopped": Hang(before_step(stop_self, rank=3, step=6), 3, LATER, "no sign of life", None),
    "sleep": Hang(before_step(sleep_on, rank=2, step=6), 2, SOON, "in sleep_on", "sleep_on"),
    "data": Hang(partial(block_data, at_rank=3, step=6), 3, SOON, "(reading data)", "rows"),
}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Run, Attempt]]]:
    """All runs one after another, those that wait longest first: they hang while the next ones train."""
    root = tmp_path_factory.mktemp("hangs")
    # Ranks that hang may take a save in the background with them: here each is over before training goes on.
    recipe = small_recipe(write_tokens(root / "tokens"), checkpoint={"every_steps": 2, "asynchronous": False})
    found: dict[str, tuple[Run, Attempt]] = {}
    try:
        for name, hang in HANGS.items():
            run = Run.create(root / name, recipe)
            attempt = run.start(tp=2, pp=2, fault=hang.fault, env={"HPJOB_HANG_FLOOR_S": hang.floor_s})
            found[name] = run, attempt
            attempt.wait_for_step(4)
        yield found
    finally:
        for _, attempt in found.values():
            attempt.kill()


@pytest.mark.parametrize("name", HANGS)
def test_a_rank_that_hangs_is_named(started: dict[str, tuple[Run, Attempt]], name: str) -> None:
    (run, attempt), hang = started[name], HANGS[name]
    others = [process for number, process in enumerate(attempt.ranks) if number != hang.rank]
    for process in others:
        process.join(timeout=PATIENCE_S)
    assert all(process.exitcode not in (0, None, -9) for process in others), attempt.log()
    attempt.kill()
    first = first_failure(read_failures(attempt.dir))
    assert first is not None
    assert (first.rank, first.node, first.kind) == (hang.rank, f"local-{hang.rank // 2}", "hang")
    assert hang.words in first.message
    assert hang.function is None or f"in {hang.function}" in (first.traceback or "")
    assert hang.function is None or hang.function in attempt.log(hang.rank)
    assert run.checkpoint_names()[-1] == "step-00000004"
