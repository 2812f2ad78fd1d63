"""Batches as data loaders of transformers give them, as the tensors that the engine takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hpjob.core.errors import UserInputError
from hpjob.core.schema import nearest
from hpjob.runtime.data.documents import document_positions, ignore_ends
from hpjob.runtime.engine import Batch
from hpjob.runtime.parallel.vocabulary import IGNORED_LABEL

_KEYS = ("input_ids", "labels", "attention_mask", "position_ids", "document_ids")
_HINT = "give input_ids and, where wanted, labels, attention_mask, position_ids and document_ids, as tensors"


def to_batch(given: Any, seq_length: int) -> Batch:
    """Return what the engine trains on.

    Args:
        given: A :class:`Batch`, whose labels are shifted already; or a mapping of tensors (sequences, length) as
            models of transformers take them: ``labels`` stand at their own token and are shifted here, by default
            they are the ``input_ids``. Shorter sequences are filled up with tokens that count nothing.
        seq_length: Of the plan.

    Raises:
        UserInputError: A key is unknown, or a tensor does not fit.
    """
    if isinstance(given, Batch):
        return given
    tensors = as_mapping(given)
    unknown = [key for key in tensors if key not in _KEYS]
    if unknown:
        guess = nearest(unknown[0], _KEYS)
        raise UserInputError(
            f"a batch has {', '.join(map(repr, unknown))}, which no decoder takes",
            hint=f"did you mean {guess!r}?" if guess else _HINT,
        )
    if tensors["input_ids"].is_floating_point():
        raise UserInputError("batch['input_ids'] are floating-point numbers", hint="give token numbers as integers")
    ids = tensors["input_ids"].long()
    for key, value in tensors.items():
        if value.shape != ids.shape or ids.dim() != 2:
            raise UserInputError(
                f"batch[{key!r}] has shape {tuple(value.shape)}, input_ids {tuple(ids.shape)}",
                hint="give tensors of shape (sequences, length)",
            )
    return _filled(_shifted(ids, tensors), seq_length)


def check_vocabulary(batch: Batch, vocab_size: int) -> None:
    """Refuse token numbers that a model does not have; only on CPU, where looking waits for no device.

    Raises:
        UserInputError: An input or a label that counts is no token of the vocabulary.
    """
    for name, ids in (("input_ids", batch.input_ids), ("labels", batch.labels)):
        if ids.device.type != "cpu" or not ids.numel():
            continue
        counted = ids if name == "input_ids" else ids[ids != IGNORED_LABEL]
        outside = counted[(counted < 0) | (counted >= vocab_size)]
        if outside.numel():
            raise UserInputError(
                f"batch[{name!r}] has token {int(outside[0])}, the model's vocabulary has {vocab_size} "
                f"(0 to {vocab_size - 1})",
                hint="use the model's own tokenizer, or a model with a larger vocab_size",
            )


def as_mapping(given: Any) -> dict[str, Tensor]:
    """Return a batch's tensors by name; a tensor alone is its ``input_ids``.

    Raises:
        UserInputError: There are no ``input_ids``.
    """
    if isinstance(given, Tensor):
        return {"input_ids": given}
    if not isinstance(given, Mapping) or given.get("input_ids") is None:
        raise UserInputError(f"a batch of type {type(given).__name__} has no input_ids", hint=_HINT)
    return {str(key): torch.as_tensor(value) for key, value in given.items() if value is not None}


def _shifted(ids: Tensor, tensors: Mapping[str, Tensor]) -> Batch:
    own = tensors.get("labels", ids).long()
    mask = tensors.get("attention_mask")
    if mask is not None:
        own = own.masked_fill(_hidden(mask), IGNORED_LABEL)
    labels = functional.pad(own[:, 1:], (0, 1), value=IGNORED_LABEL)
    documents = tensors.get("document_ids")
    if documents is not None:
        labels = ignore_ends(labels, documents)
    positions = tensors.get("position_ids")
    if positions is None:
        positions = document_positions(torch.zeros_like(ids) if documents is None else documents)
    return Batch(input_ids=ids, labels=labels, position_ids=positions, document_ids=documents)


def _hidden(mask: Tensor) -> Tensor:
    """Return where padding is; it must come last, where causal attention never looks from a real token."""
    shown = mask.bool()
    if bool((shown[:, 1:] & ~shown[:, :-1]).any()):
        raise UserInputError(
            "the attention_mask hides tokens before others that are shown",
            hint="pad on the right: tokenizer.padding_side = 'right'; packed documents are given by document_ids",
        )
    return ~shown


def _filled(batch: Batch, seq_length: int) -> Batch:
    missing = seq_length - batch.input_ids.shape[1]
    if missing < 0:
        raise UserInputError(
            f"sequences of {batch.input_ids.shape[1]} tokens are longer than seq_length {seq_length}",
            hint="configure the model with the longest length, or cut the sequences",
        )

    def longer(tensor: Tensor, fill: int) -> Tensor:
        return functional.pad(tensor, (0, missing), value=fill) if missing else tensor

    return Batch(
        input_ids=longer(batch.input_ids, 0),
        labels=longer(batch.labels, IGNORED_LABEL),
        position_ids=longer(batch.position_ids, 0),
        document_ids=None if batch.document_ids is None else longer(batch.document_ids, -1),
    )
