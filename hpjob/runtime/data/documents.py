"""Packed documents: which document each token is of, where positions begin anew, which labels cross a border."""

from __future__ import annotations

import torch
from torch import Tensor

from hpjob.runtime.parallel.vocabulary import IGNORED_LABEL


def document_ids(input_ids: Tensor, end_token: int) -> Tensor:
    """Return the number of each token's document, from 0 in each sequence.

    Args:
        input_ids: (batch, length).
        end_token: Last token of every document; it belongs to the document that it ends.
    """
    ends = (input_ids == end_token).long()
    return ends.cumsum(1) - ends


def document_positions(documents: Tensor) -> Tensor:
    """Return positions that count from 0 in each document.

    Args:
        documents: (batch, length), numbers that change where a document begins.
    """
    count = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return count - torch.where(begins, count, 0).cummax(1).values


def ignore_ends(labels: Tensor, documents: Tensor) -> Tensor:
    """Return shifted labels without those of a document's last token, whose next token is another document's."""
    last = torch.zeros_like(documents, dtype=torch.bool)
    last[:, :-1] = documents[:, 1:] != documents[:, :-1]
    return labels.masked_fill(last, IGNORED_LABEL)
