"""Ranks that are started once for these tests."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the runtime's tests need the [train] extra")
pytest.importorskip("transformers", reason="the runtime's tests need the [train] extra")

from hpjob.runtime.process_pool import ProcessPool
from tests.support.rank_pool import shared_rank_pool


@pytest.fixture(scope="session")
def pool() -> ProcessPool:
    return shared_rank_pool()
