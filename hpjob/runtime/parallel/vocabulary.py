"""Embedding, head and cross entropy with the vocabulary cut over the tensor-parallel group.

Chunks are those of ``torch.chunk``: the vocabulary need not divide by the group's size, the last rank
then holds a shorter chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from hpjob.runtime.embedding_rows import RowReceiver, handing_embedding, load_kernels
from hpjob.runtime.parallel.collectives import all_reduce
from hpjob.runtime.parallel.linear import cut_parameter, local_tensor
from hpjob.runtime.parallel.region import chunk_bounds
from hpjob.runtime.parallel.tensor_region import TensorRegion

IGNORED_LABEL = -100
"""Label of a position that has no target; torch's and transformers' convention."""


class VocabularyParallelEmbedding(nn.Module):
    """Token embedding; each rank looks up the tokens of its chunk, the sum over ranks is whole.

    Attributes:
        receiver: Takes the weight's gradient in place of autograd.
    """

    receiver: RowReceiver | None = None

    def __init__(self, vocab_size: int, hidden_size: int, *, region: TensorRegion) -> None:
        super().__init__()
        self.region = region
        self.begin, self.end = chunk_bounds(vocab_size, region.size, region.rank)
        self.weight = cut_parameter((vocab_size, hidden_size), 0, region.mesh)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map token ids (batch, seq) to hidden states as they are outside the region."""
        if self.region.size == 1:
            return self._look_up(input_ids)
        elsewhere = (input_ids < self.begin) | (input_ids >= self.end)
        # Any id would do for them; many equal ones are slow to add up, though they are zero.
        found = self._look_up((input_ids - self.begin).remainder(self.end - self.begin))
        return self.region.leave(found.masked_fill(elsewhere.unsqueeze(-1), 0.0))

    def sum_gradients(self, total: RowReceiver) -> None:
        """Hand gradients of the weight to a sum from now on."""
        self.receiver = total
        load_kernels(local_tensor(self.weight))

    def _look_up(self, ids: Tensor) -> Tensor:
        weight = local_tensor(self.weight)
        if self.receiver is not None and self.weight.requires_grad and torch.is_grad_enabled():
            return handing_embedding(ids, weight, self.receiver)
        return F.embedding(ids, weight)


class _CrossEntropy(Function):
    """Per-token loss from logits cut along the vocabulary; two collectives forward, none backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, begin: int, group: dist.ProcessGroup) -> Tensor:
        values = logits.float()
        top = all_reduce(values.amax(1), group, "max")
        exponentials = (values - top.unsqueeze(1)).exp_()
        local = labels - begin
        here = (local >= 0) & (local < values.shape[1])
        index = local.masked_fill(~here, 0).unsqueeze(1)
        picked = values.gather(1, index).squeeze(1) - top
        sums = all_reduce(torch.stack([exponentials.sum(1), picked.masked_fill(~here, 0.0)]), group)
        valid = labels != IGNORED_LABEL
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(1)), index, here, valid)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]).masked_fill(~valid, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, index, here, valid = ctx.saved_tensors
        scale = gradient.masked_fill(~valid, 0.0).unsqueeze(1)
        out = probabilities * scale
        out.scatter_add_(1, index, -scale * here.unsqueeze(1))
        return out.to(ctx.dtype), None, None, None


def cross_entropy_sum(logits: Tensor, labels: Tensor, *, begin: int, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the token losses in fp32, equal on all ranks of the group.

    Args:
        logits: (batch, seq, this rank's chunk of the vocabulary).
        labels: (batch, seq), global token ids; :data:`IGNORED_LABEL` counts nothing.
        begin: First token id of the chunk.
        group: The tensor-parallel group.
    """
    flat = logits.flatten(0, 1)
    targets = labels.flatten()
    if group.size() == 1:
        return F.cross_entropy(flat.float(), targets, ignore_index=IGNORED_LABEL, reduction="sum")
    losses: Tensor = _CrossEntropy.apply(flat, targets, begin, group)  # type: ignore[no-untyped-call]
    return losses.sum()
