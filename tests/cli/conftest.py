"""Fixtures of the tests of commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpjob.cli.app import main
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


def write_corpus(folder: Path, num_tokens: int = 10_000) -> None:
    """Write token files that pass the check before submission."""
    folder.mkdir()
    (folder / "tokens.bin").write_bytes(b"\1\0" * num_tokens)
    meta = {
        "version": 1, "dtype": "uint16", "num_tokens": num_tokens, "num_documents": 1, "vocab_size": 1024,
        "eos_token": "<eos>", "eos_token_id": 0, "sources": [], "source_bytes": 0, "source_sha256": "", "settings": {},
        "tokens_sha256": "", "tokenizer_sha256": "",
    }  # fmt: skip
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
