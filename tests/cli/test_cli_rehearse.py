"""`hpjob rehearse`."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.cli.conftest import Cli

TINY = ("rehearse", "--recipe", "tiny", "--nodes", "2", "--machine", "cpu", "--device", "cpu")


def test_one_rank_as_json(cli: Cli) -> None:
    pytest.importorskip("torch", reason="a rehearsal needs the [train] extra")
    done = cli(*TINY, "--rank", "5", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    (rank,) = document["ranks"]
    assert (rank["rank"], rank["world_size"], rank["pp_rank"]) == (5, 8, 1)
    assert 0 < rank["weights_gib"] < rank["peak_gib"]
    assert document["plan"]["degrees"]["pp"] == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rank", "8"), "use 0 to 7"),
        (("--rank", "0", "--all-stages"), "exclude each other"),
        (("--device", "tpu"), "use cpu or cuda"),
    ],
)
def test_wrong_options(cli: Cli, options: tuple[str, ...], words: str) -> None:
    done = cli(*TINY, *options)
    assert done.code == 2 and words in done.err


def test_without_torch_it_says_what_to_install(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = cli(*TINY, "--rank", "0")
    assert done.code == 3 and "pip install 'hpjob[train]'" in done.err


def test_a_gpu_that_is_not_there(cli: Cli) -> None:
    torch = pytest.importorskip("torch", reason="a rehearsal needs the [train] extra")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = cli(*TINY[:-1], "cuda", "--rank", "0")
    assert done.code == 3 and "no GPU" in done.err
