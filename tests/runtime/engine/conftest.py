"""Ranks that are started once for all engine tests, and parity cases run on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch", reason="the runtime's tests need the [train] extra")
pytest.importorskip("transformers", reason="the runtime's tests need the [train] extra")

from hpjob.runtime.parity.case import parse_case
from hpjob.runtime.parity.compare import Outcome, compare_case
from hpjob.runtime.parity.run import References
from hpjob.runtime.process_pool import ProcessPool
from tests.runtime.engine.coverage import SMALL

STEPS = 3


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    with ProcessPool(8) as started:
        yield started


@pytest.fixture(scope="session")
def parity(pool: ProcessPool) -> Callable[..., Outcome]:
    """Run a parity case of the small model; one-process references are kept."""
    references = References(STEPS)

    def run(text: str, *, broken: str | None = None, precision: str = "fp32", model: str = "llama") -> Outcome:
        case = parse_case(f"{SMALL} precision={precision} {text}", world=None, steps=STEPS, model_type=model)
        return compare_case(pool, case, references.of(case), STEPS, broken)

    return run
