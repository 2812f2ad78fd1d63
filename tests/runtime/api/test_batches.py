"""Batches in the form of transformers become the engine's: shifted once, padding and borders ignored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpjob.core.errors import UserInputError
from hpjob.runtime.api.batches import check_vocabulary, to_batch
from hpjob.runtime.engine import Batch

IDS = torch.tensor([[5, 6, 7, 8]])


def test_labels_are_shifted_and_a_short_sequence_is_filled_up() -> None:
    batch = to_batch({"input_ids": IDS}, 6)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 0, 0]]
    assert batch.labels.tolist() == [[6, 7, 8, -100, -100, -100]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 0]]
    assert batch.document_ids is None
    assert torch.equal(to_batch(IDS, 6).labels, batch.labels)
    assert to_batch(batch, 6) is batch


def test_padding_and_ignored_labels_count_nothing() -> None:
    batch = to_batch({"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 1, 0]])}, 4)
    assert batch.labels.tolist() == [[6, 7, -100, -100]]
    batch = to_batch({"input_ids": IDS, "labels": torch.tensor([[-100, -100, 7, 8]]), "position_ids": None}, 4)
    assert batch.labels.tolist() == [[-100, 7, 8, -100]]


def test_documents_begin_anew() -> None:
    batch = to_batch({"input_ids": IDS, "document_ids": torch.tensor([[3, 3, 4, 4]])}, 5)
    assert batch.labels.tolist() == [[6, -100, 8, -100, -100]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 0]]
    assert batch.document_ids is not None
    assert batch.document_ids.tolist() == [[3, 3, 4, 4, -1]]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"labels": IDS}, "has no input_ids"),
        ([1, 2], "has no input_ids"),
        ({"input_ids": IDS, "token_type_ids": IDS}, "'token_type_ids', which no decoder takes"),
        ({"input_ids": IDS, "labels": IDS[:, :3]}, "has shape (1, 3), input_ids (1, 4)"),
        ({"input_ids": IDS[0]}, "has shape (4,)"),
        ({"input_ids": IDS.repeat(1, 2)}, "sequences of 8 tokens are longer than seq_length 6"),
    ],
)
def test_what_does_not_fit_is_said(given: Any, sentence: str) -> None:
    with pytest.raises(UserInputError) as caught:
        to_batch(given, 6)
    assert sentence in caught.value.message


def test_token_numbers_are_whole() -> None:
    with pytest.raises(UserInputError, match="floating-point"):
        to_batch({"input_ids": IDS.float()}, 4)


@pytest.mark.parametrize(("name", "token"), [("input_ids", 100), ("input_ids", -1), ("labels", 512)])
def test_tokens_outside_the_vocabulary_are_named(name: str, token: int) -> None:
    ids = torch.zeros(1, 8, dtype=torch.int64)
    labels = torch.full((1, 8), -100)
    fine = Batch(input_ids=ids, labels=labels, position_ids=ids)
    check_vocabulary(fine, 100)
    {"input_ids": ids, "labels": labels}[name][0, 5] = token
    with pytest.raises(UserInputError, match=f"{name}.*has token {token}, the model's vocabulary has 100"):
        check_vocabulary(fine, 100)
    check_vocabulary(Batch(input_ids=ids.to("meta"), labels=labels.to("meta"), position_ids=ids), 100)
