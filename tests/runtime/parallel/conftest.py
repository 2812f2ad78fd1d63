"""Fixtures: the shared pool of gloo workers."""

from __future__ import annotations

import pytest

from tests.runtime.gloo_pool import GlooPool, shared_pool


@pytest.fixture
def pool() -> GlooPool:
    return shared_pool()
