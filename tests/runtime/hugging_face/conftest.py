"""Ranks that are started once for these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="the runtime's tests need the [train] extra")
pytest.importorskip("transformers", reason="the runtime's tests need the [train] extra")

from hpjob.runtime.process_pool import ProcessPool


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    with ProcessPool(4, timeout_s=120) as started:
        yield started
