"""Gradients of a token embedding that are made once for several microbatches.

Autograd would make a gradient of the weight's size for every microbatch, and a further pass would add it to the fp32
sum: work that grows with the vocabulary. Here the backward pass hands on the rows of the tokens, which wait until there
are as many as the weight has rows or the sum is asked for. Autograd gives the weight no gradient.

What waits takes at most a microbatch more than the memory of the weight. It is added up in fp32, whatever its dtype,
always in the order in which it came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

_COLUMNS = 1024
"""That are added up at once: in fp32, rows, their sums and what the kernel takes beside them are 12 bytes an element of
the weight's, and of a wide weight they then need no more than what waits."""
_MANY_TOKENS = 4096
"""From about here on torch sorts them, and as many as it ever sorts."""


class RowReceiver(Protocol):
    """Takes the gradient of an embedding's weight."""

    def add_rows(self, ids: Tensor, rows: Tensor, num_rows: int) -> None:
        """Add rows (tokens, width) to those of the weight that ``ids`` (tokens,) name, now or later."""


def handing_embedding(ids: Tensor, weight: Tensor, receiver: RowReceiver) -> Tensor:
    """Return the rows of a weight; the backward pass hands the weight's gradient to a receiver.

    Args:
        ids: Integers of any shape.
        weight: (rows, width), wants a gradient.
        receiver: Takes it.
    """
    found: Tensor = _HandingEmbedding.apply(ids, weight, receiver)  # type: ignore[no-untyped-call]
    return found


class _HandingEmbedding(Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, receiver: RowReceiver) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.num_rows, ctx.receiver = len(weight), receiver
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        ctx.receiver.add_rows(ids.flatten(), gradients[0].flatten(0, -2), ctx.num_rows)
        return None, None, None


class WaitingRows:
    """Rows of one weight's gradient that are not in its sum yet."""

    def __init__(self) -> None:
        self._ids: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._num_rows = 0

    def append(self, ids: Tensor, rows: Tensor, num_rows: int) -> bool:
        """Keep rows, which must not be changed afterwards; returns whether they are to be added up now.

        Args:
            ids: (tokens,).
            rows: (tokens, width).
            num_rows: Of the weight.
        """
        self._ids.append(ids)
        self._rows.append(rows)
        self._num_rows = num_rows
        return sum(map(len, self._ids)) >= num_rows

    def clear(self) -> None:
        """Forget them."""
        self._ids, self._rows = [], []

    def add_to(self, total: Tensor | None, home: Tensor | None = None) -> Tensor | None:
        """Return ``total`` and what waits, in the memory of an fp32 total; nothing waits any more.

        Args:
            total: (rows, width); None = zero.
            home: What the first sum is written to.
        """
        if not self._ids:
            return total
        with torch.no_grad():
            result = add_rows(total, self._ids, self._rows, self._num_rows, home)
        self.clear()
        return result


def add_rows(
    total: Tensor | None, ids: Sequence[Tensor], rows: Sequence[Tensor], num_rows: int, home: Tensor | None = None
) -> Tensor:
    """Return ``total`` and, in each of its rows, the sum of the rows of that id; fp32.

    Args:
        total: (``num_rows``, width), its memory is used if it is fp32; None = zero.
        ids: Each (tokens,).
        rows: Of each, (tokens, width).
        num_rows: Of the weight.
        home: What the first sum is written to.
    """
    numbers, width = torch.cat(list(ids)), rows[0].shape[1]
    result = home if total is None else total.float()
    if result is None:
        result = rows[0].new_empty((num_rows, width), dtype=torch.float32)
    for begin in range(0, width, _COLUMNS):
        columns = slice(begin, begin + _COLUMNS)
        parts = [part[:, columns] for part in rows]
        together = parts[0].new_empty((len(numbers), parts[0].shape[1]), dtype=torch.float32)
        torch.cat(parts, out=together)
        # It sorts, so the order of the additions is always the same. No id is left out.
        sums = torch.ops.aten.embedding_dense_backward(together, numbers, num_rows, -1, False)
        write = result[:, columns].copy_ if total is None else result[:, columns].add_
        write(sums)
    return result


def load_kernels(weight: Tensor) -> None:
    """Run once on a GPU what adds rows up, so that no step loads its code between messages of a pipeline.

    Args:
        weight: Of the embedding.
    """
    if not weight.is_cuda:
        return
    num_rows, width = len(weight), min(weight.shape[1], _COLUMNS)
    ids = torch.arange(max(num_rows, _MANY_TOKENS), device=weight.device) % num_rows
    rows = torch.zeros(len(ids), width, dtype=weight.dtype, device=weight.device)
    total = None
    for _ in range(2):
        total = add_rows(total, [ids], [rows], num_rows)
