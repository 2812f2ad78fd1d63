"""Zigzag order: split, merge, positions, padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpjob.core.errors import UserInputError
from hpjob.runtime.sequence.zigzag import padded_length, zigzag_merge, zigzag_position_ids, zigzag_split


@settings(deadline=None, max_examples=40)
@given(sp_size=st.integers(1, 8), chunk=st.integers(1, 5), dim=st.integers(0, 2))
def test_merge_undoes_split(sp_size: int, chunk: int, dim: int) -> None:
    length = 2 * sp_size * chunk
    shape = [2, 3, 4]
    shape[dim] = length
    whole = torch.randn(shape)
    parts = [zigzag_split(whole, rank, sp_size, dim=dim) for rank in range(sp_size)]
    assert all(part.shape[dim] == length // sp_size for part in parts)
    assert torch.equal(zigzag_merge(parts, dim=dim), whole)


def test_position_ids_name_the_tokens_that_split_returns() -> None:
    tokens = torch.arange(24)
    for rank in range(3):
        assert torch.equal(zigzag_split(tokens, rank, 3, dim=0), zigzag_position_ids(24, rank, 3))


def test_causal_work_is_equal_on_all_ranks() -> None:
    work = {int((zigzag_position_ids(48, rank, 4) + 1).sum()) for rank in range(4)}
    assert len(work) == 1


@settings(deadline=None, max_examples=40)
@given(length=st.integers(1, 1000), sp_size=st.integers(1, 16))
def test_padded_length_is_the_next_multiple(length: int, sp_size: int) -> None:
    padded = padded_length(length, sp_size)
    assert padded % (2 * sp_size) == 0
    assert length <= padded < length + 2 * sp_size


def test_indivisible_length_is_refused_with_the_padded_length() -> None:
    with pytest.raises(UserInputError, match="30 tokens") as error:
        zigzag_split(torch.zeros(1, 30), 0, 4)
    assert "pad to 32" in error.value.hint
