"""A rank that does nothing at all where things may be slow by nature: named long before patience ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest

from hpjob.core.run_records import first_failure, read_failures
from tests.support.faults import Fault, before_step, block_save, block_set_up, sleep_on
from tests.support.run_folder import Attempt, Run, small_recipe, write_tokens

# One worker starts the runs of all these tests.
pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("hangs")]
IDLE_S = "8"
"""``HPJOB_IDLE_LIMIT_S``."""


@dataclass(frozen=True)
class Idle:
    """Where a rank sleeps, what that is called, and the newest checkpoint that is there then."""

    fault: Fault
    rank: int
    phase: str
    checkpoint: str | None


CASES = {
    "set-up": Idle(partial(block_set_up, at_rank=1), 1, "(set-up)", None),
    "first step of rank 0": Idle(before_step(sleep_on, rank=0, step=1), 0, "(first step)", None),
    # Found when the next save has to wait for the one that hangs in the background.
    "save": Idle(partial(block_save, at_rank=1, step=4), 1, "(save)", "step-00000002"),
}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Run, Attempt]]]:
    """All runs at once: they mostly sleep."""
    root = tmp_path_factory.mktemp("idle")
    recipe = small_recipe(write_tokens(root / "tokens"), checkpoint={"every_steps": 2})
    found: dict[str, tuple[Run, Attempt]] = {}
    try:
        for name, case in CASES.items():
            run = Run.create(root / name, recipe)
            found[name] = run, run.start(dp=2, fault=case.fault, env={"HPJOB_IDLE_LIMIT_S": IDLE_S})
        yield found
    finally:
        for _, attempt in found.values():
            attempt.kill()


@pytest.mark.parametrize("name", CASES)
def test_a_rank_that_does_nothing_is_named(started: dict[str, tuple[Run, Attempt]], name: str) -> None:
    (run, attempt), case = started[name], CASES[name]
    codes = attempt.wait()
    assert all(code not in (0, None, -9) for code in codes), attempt.log()
    first = first_failure(read_failures(attempt.dir))
    assert first is not None
    assert (first.rank, first.kind, first.exception) == (case.rank, "hang", "Hang")
    assert case.phase in first.message and "in sleep_on" in first.message
    assert "in sleep_on" in (first.traceback or "")
    complete = [name for name in run.checkpoint_names() if "." not in name]
    assert complete[-1:] == ([case.checkpoint] if case.checkpoint else [])
