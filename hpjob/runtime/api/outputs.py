"""What a criterion gets from the model: loss and logits of one microbatch, put together when they are read."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from hpjob.plan.model import Axis
from hpjob.runtime.engine import Engine
from hpjob.runtime.model.stage import DecoderStage
from hpjob.runtime.parallel.collectives import reduce_from_group
from hpjob.runtime.parallel.region import chunk_bounds
from hpjob.runtime.parallel.vocabulary import IGNORED_LABEL
from hpjob.runtime.pipeline.executor import Microbatch
from hpjob.runtime.sequence.zigzag import zigzag_merge


class CausalLMOutput:
    """Output of the last stage for one microbatch.

    Args:
        engine: Knows how sequence and vocabulary are spread.
        stage: The last one.
        local_logits: (batch, this rank's part of the sequence, its chunk of the vocabulary).
        microbatch: Its labels.
        gathers_vocabulary: Whether :attr:`logits` spans the vocabulary.
    """

    def __init__(
        self,
        engine: Engine,
        stage: DecoderStage,
        local_logits: Tensor,
        microbatch: Microbatch,
        *,
        gathers_vocabulary: bool,
    ) -> None:
        self._engine = engine
        self._stage = stage
        self._local = local_logits
        self._labels = microbatch.labels
        self._gathers_vocabulary = gathers_vocabulary
        self._logits: Tensor | None = None

    @property
    def loss(self) -> Tensor:
        """Mean token loss of this microbatch, fp32, equal on all ranks of its tp and sp groups."""
        group = self._engine.mesh.group(Axis.SP)
        count = (self._labels != IGNORED_LABEL).sum()
        if group.size() > 1:
            dist.all_reduce(count, group=group)
        # Backward, each rank's part of the sequence gets the gradient of the whole sum.
        total = reduce_from_group(self._stage.loss_sum(self._local, self._labels) * 1.0, group)
        return total / count.clamp(min=1)

    @property
    def logits(self) -> Tensor:
        """(batch, whole sequence, vocabulary or this tensor-parallel rank's chunk of it), gathered when first read."""
        if self._logits is None:
            self._logits = self._gather()
        return self._logits

    def _gather(self) -> Tensor:
        mesh, split = self._engine.mesh, self._engine.split
        logits = self._local
        if self._gathers_vocabulary and mesh.size(Axis.TP) > 1:
            sizes = _chunk_sizes(self._stage.shape.vocab_size, mesh.size(Axis.TP))
            logits = _gather(logits, 2, sizes, mesh.group(Axis.TP))
        if mesh.size(Axis.SP) > 1:
            sizes = [logits.shape[1]] * mesh.size(Axis.SP)
            logits = _gather(logits, 1, sizes, mesh.group(Axis.SP))
            if split.order == "zigzag":
                logits = zigzag_merge(logits.chunk(split.parts, dim=1))
        return logits[:, : split.length]


class MergedOutput:
    """Outputs of a whole batch.

    Attributes:
        logits: (sequences, length, vocabulary or a chunk of it).
        loss: None; each microbatch had its own.
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.loss = None


def _chunk_sizes(length: int, parts: int) -> list[int]:
    return [end - begin for begin, end in (chunk_bounds(length, parts, index) for index in range(parts))]


class _Gather(Function):
    """All parts of a group along a dim; every rank goes on with the same, so each gets back its part's gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        rank = dist.get_rank(group)
        ctx.dim, ctx.begin, ctx.size = dim, sum(sizes[:rank]), sizes[rank]
        padded = part.movedim(dim, 0)
        missing = max(sizes) - sizes[rank]
        if missing:
            padded = torch.cat([padded, padded.new_zeros(missing, *padded.shape[1:])])
        padded = padded.contiguous()
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([p[:size] for p, size in zip(parts, sizes, strict=True)]).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient.narrow(ctx.dim, ctx.begin, ctx.size).contiguous(), None, None, None


def _gather(part: Tensor, dim: int, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    whole: Tensor = _Gather.apply(part, dim, sizes, group)  # type: ignore[no-untyped-call]
    return whole
