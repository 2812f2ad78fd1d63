"""Output of the local queries over several blocks of keys, merged by their log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from hpjob.runtime.sequence.ring import Ring
from hpjob.runtime.sequence.row_sums import rescale_and_add, sum_dtype, write_weighted_sum
from hpjob.runtime.sequence.zigzag import zigzag_halves


class MergedBlocks:
    """Output and log-sum-exp of the local queries over the blocks so far.

    A half of the rows is kept in fp32 between its merges. Its last merge writes in the place and the dtype of the
    first block's output; with two ranks that is the only one. Rows that no visiting block touches stay as they are.

    Args:
        out: Of the rank's own block; shape (batch, sequence, heads, head_dim). It is written to.
        lse: Shape (batch, heads, sequence).
        ring: Says how many blocks will come.

    Attributes:
        out: The merged output.
        lse: The merged log-sum-exp, contiguous.
    """

    def __init__(self, out: Tensor, lse: Tensor, ring: Ring) -> None:
        self.out = out
        self.lse = lse.contiguous()
        self._buffers = ring.buffers
        # Early queries meet the keys of lower ranks only.
        self._to_come = [ring.rank, ring.size - 1]
        self._sums: list[Tensor | None] = [None, None]

    def add(self, queries: slice, out: Tensor, lse: Tensor) -> None:
        """Merge the block of these queries."""
        for half, rows in enumerate(zigzag_halves(self.out.shape[1])):
            if rows.start >= queries.start:
                part = slice(rows.start - queries.start, rows.stop - queries.start)
                self._add_half(half, rows, out[:, part], lse[:, :, part])

    def _add_half(self, half: int, rows: slice, out: Tensor, lse: Tensor) -> None:
        old_lse = self.lse[:, :, rows]
        new_lse = torch.logaddexp(old_lse, lse)
        weights = [torch.exp(each - new_lse).transpose(1, 2).contiguous() for each in (old_lse, lse)]
        old_lse.copy_(new_lse)
        self._to_come[half] -= 1
        first, total = self.out[:, rows], self._sums[half]
        is_last = not self._to_come[half]
        if total is None and (is_last or first.dtype == sum_dtype(first)):
            rescale_and_add(first, weights[0], out, weights[1])
        elif total is None:
            total = self._buffers.take(first.shape, sum_dtype(first), first.device)
            self._sums[half] = total
            write_weighted_sum(total, first, weights[0], out, weights[1])
        elif is_last:
            write_weighted_sum(first, total, weights[0], out, weights[1])
            self._buffers.give_back(total)
        else:
            rescale_and_add(total, weights[0], out, weights[1])
