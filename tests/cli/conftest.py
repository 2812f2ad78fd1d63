"""Fixtures of the tests of commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpjob.cli.app import main
from tests.support.corpus import write_corpus
from tests.support.fake_slurm import FakeSlurm, install

Cli = Callable[..., "Result"]


@dataclass(frozen=True)
class Result:
    """What a command left on the screen."""

    code: int
    out: str
    err: str


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Fake Slurm commands on PATH."""
    return install(tmp_path / "fake-slurm", monkeypatch)


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs `hpjob …` in a folder of its own that has token files in `corpus`."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    write_corpus(work / "corpus")

    def run(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["hpjob", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        code = caught.value.code
        return Result(code if isinstance(code, int) else 1, captured.out, captured.err)

    return run
