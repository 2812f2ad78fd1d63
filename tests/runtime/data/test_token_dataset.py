"""Samples: their order is a permutation, depends on the step alone, and is the same for every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpjob.core.errors import UserInputError
from hpjob.recipe.data_files import check_token_files
from hpjob.runtime.data.order import shuffled
from hpjob.runtime.data.tokens import TokenDataset
from tests.support.run_folder import small_recipe, write_tokens

FIRST_EPOCH = [8, 7, 9, 2, 1, 5, 6, 0, 4, 3]
LARGE = 891_455_596_121


@given(size=st.integers(1, 300), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 1000))
def test_order_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(shuffled(index, size, seed, epoch) for index in range(size)) == list(range(size))


def test_order_is_fixed_for_all_time() -> None:
    """A change here would make every resumed run see other samples."""
    assert [shuffled(index, 10, 1234, 0) for index in range(10)] == FIRST_EPOCH
    assert shuffled(123_456_789, 10**12, 1234, 3) == LARGE


def test_epochs_and_seeds_differ_and_neighbours_are_spread() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [shuffled(index, 1000, seed, epoch) for index in range(1000)]

    base = order(1, 0)
    for other in (order(1, 1), order(2, 0), list(range(1000))):
        assert sum(a == b for a, b in zip(base, other, strict=True)) < 20
    steps = np.abs(np.diff(base))
    assert 250 < steps.mean() < 420  # a random permutation of n has a mean of n / 3


@pytest.fixture
def dataset(tmp_path: Path) -> TokenDataset:
    data = write_tokens(tmp_path / "data", num_tokens=64 * 30 + 5)
    return TokenDataset(small_recipe(data))


def test_sample_and_labels_are_shifted_by_one(dataset: TokenDataset) -> None:
    tokens = np.fromfile(dataset.path, dtype="<u2")
    inputs, labels = dataset.rows(step=1, dp_rank=0, dp_size=1)
    assert inputs.shape == labels.shape == (8, 64)
    for row, index in enumerate(dataset.sample_indices(1, 0, 1)):
        start = index * 64
        assert inputs[row].tolist() == tokens[start : start + 64].tolist()
        assert labels[row].tolist() == tokens[start + 1 : start + 65].tolist()


@pytest.mark.parametrize("dp_size", [1, 2, 4, 8])
def test_every_layout_sees_the_same_global_batch(dataset: TokenDataset, dp_size: int) -> None:
    whole = dataset.sample_indices(3, 0, 1)
    parts = [index for rank in range(dp_size) for index in dataset.sample_indices(3, rank, dp_size)]
    assert parts == whole


def test_an_epoch_holds_every_sample_once(dataset: TokenDataset) -> None:
    assert dataset.num_samples == 30
    seen = [index for step in range(1, 16) for index in dataset.sample_indices(step, 0, 1)]
    for epoch in range(4):
        assert sorted(seen[epoch * 30 : (epoch + 1) * 30]) == list(range(30))


def test_changed_tokens_are_noticed(dataset: TokenDataset) -> None:
    dataset.verify_checksum()
    content = bytearray(dataset.path.read_bytes())
    content[10] ^= 1
    dataset.path.write_bytes(content)
    with pytest.raises(UserInputError, match="changed after it was prepared"):
        dataset.verify_checksum()


def test_fitting_token_files_pass(tmp_path: Path) -> None:
    data = write_tokens(tmp_path / "data", num_tokens=513)
    assert check_token_files(data, vocab_size=512, seq_length=64, global_batch_size=8).num_tokens == 513


@pytest.mark.parametrize(
    ("change", "check", "message"),
    [
        ({}, {"vocab_size": 511}, "vocabulary of 512, the model has 511"),
        ({"num_tokens": 512}, {}, "7 samples of 64, fewer than one global batch of 8"),
        ({"cut": True}, {}, "has 1025 bytes, but meta.json says 513 tokens"),
        ({"remove": "tokens.bin"}, {}, "tokens.bin cannot be read"),
        ({"remove": "meta.json"}, {}, "has no meta.json"),
        ({"meta": "{"}, {}, "meta.json cannot be read"),
        ({"meta": "{}"}, {}, "dtype: missing"),
    ],
)
def test_unfit_token_files_are_refused(
    tmp_path: Path, change: dict[str, object], check: dict[str, int], message: str
) -> None:
    data = write_tokens(tmp_path / "data", num_tokens=int(str(change.get("num_tokens", 513))))
    if "cut" in change:
        (data / "tokens.bin").write_bytes((data / "tokens.bin").read_bytes()[:-1])
    if "remove" in change:
        (data / str(change["remove"])).unlink()
    if "meta" in change:
        (data / "meta.json").write_text(str(change["meta"]))
    with pytest.raises(UserInputError, match=message) as refused:
        check_token_files(data, **{"vocab_size": 512, "seq_length": 64, "global_batch_size": 8, **check})
    assert refused.value.hint


@pytest.mark.parametrize("path", [None, "nowhere"])
def test_missing_path_is_refused(path: str | None, tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"data\.path|does not exist"):
        check_token_files(path and tmp_path / path, vocab_size=512, seq_length=64)
