"""Fixtures of the tests of submission."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fake_slurm import FakeSlurm, install


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Fake Slurm commands on PATH."""
    return install(tmp_path / "fake-slurm", monkeypatch)
