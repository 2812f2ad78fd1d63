"""Masks beyond plain causality: packed documents and sliding windows, as additive blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MASKED_SCORE = -30000.0
"""Added to a forbidden score. Finite, so that a row without any allowed key in one block stays a number
(its weight then vanishes when blocks are merged), and inside the range of fp16."""


def document_ids_from_position_ids(position_ids: Tensor) -> Tensor:
    """Number of the document of each token, where positions start again at 0 with each packed document.

    Args:
        position_ids: Shape (batch, sequence), natural order, integer.

    Returns:
        Same shape, int32, counting from 0 or 1 in each row.
    """
    return (position_ids == 0).cumsum(dim=-1).to(torch.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceMask:
    """What a query may see besides being causal.

    Attributes:
        document_ids: Shape (batch, whole sequence) in natural order, on every rank of the group; a query sees
            only keys of its own document. None for one document a row.
        sliding_window: A query sees this many newest keys, itself included; None for all.
    """

    document_ids: Tensor | None = None
    sliding_window: int | None = None

    def bias(self, query_positions: Tensor, key_positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Additive causal mask of one block.

        Args:
            query_positions: Shape (queries,), positions in the whole sequence.
            key_positions: Shape (keys,).
            dtype: Floating type of the result.

        Returns:
            Shape (batch or 1, 1, queries, keys): 0 where allowed, ``MASKED_SCORE`` elsewhere.
        """
        distance = query_positions[:, None] - key_positions[None, :]
        allowed = distance >= 0
        if self.sliding_window is not None:
            allowed = allowed & (distance < self.sliding_window)
        allowed = allowed[None]
        if self.document_ids is not None:
            queries = self.document_ids[:, query_positions]
            keys = self.document_ids[:, key_positions]
            allowed = allowed & (queries[:, :, None] == keys[:, None, :])
        zero = torch.zeros((), dtype=dtype, device=distance.device)
        return torch.where(allowed, zero, zero + MASKED_SCORE)[:, None]


def sequence_mask(document_ids: Tensor | None, sliding_window: int | None, length: int) -> SequenceMask | None:
    """The mask needed for a whole sequence of ``length`` tokens, or None where plain causality is enough."""
    window = sliding_window if sliding_window is not None and sliding_window < length else None
    if document_ids is None and window is None:
        return None
    return SequenceMask(document_ids=document_ids, sliding_window=window)
