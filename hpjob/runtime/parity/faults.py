"""Deliberate faults: a parity check that does not fail with one of them proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hpjob.runtime import engine
from hpjob.runtime.parallel import collectives
from hpjob.runtime.parallel.vocabulary import IGNORED_LABEL
from hpjob.runtime.pipeline import executor
from hpjob.runtime.sequence import sequence_split


def _drop_tp_allreduce() -> Any:
    """Leave out the sum of the gradients that enter a tensor-parallel block."""
    return patch.object(collectives._CopyToGroup, "backward", staticmethod(lambda _, gradient: (gradient, None)))


def _mean_of_means() -> Any:
    """Let every data-parallel rank divide by its own number of tokens."""

    def local_count(self: engine.Engine, batch: engine.Batch) -> Tensor:
        count: Tensor = (batch.labels != IGNORED_LABEL).sum() * self._mesh.dp_size
        return torch.as_tensor(count)

    return patch.object(engine.Engine, "_count_tokens", local_count)


def _drop_partial_sum() -> Any:
    """Leave out the sum of gradients of which several ranks have a share, such as a tied embedding's."""
    return patch.object(engine, "sum_gradients", lambda *_: None)


def _zigzag_order() -> Any:
    """Hand the ranks of a ring contiguous parts of the sequence, whose order attention does not expect."""

    def contiguous(tensor: Tensor, rank: int, sp_size: int) -> Tensor:
        return tensor.chunk(sp_size, dim=1)[rank].contiguous()

    return patch.object(sequence_split, "zigzag_split", contiguous)


def _unscaled_accumulation() -> Any:
    """Add microbatches up as if each were the whole batch."""
    run = executor.PipelineExecutor.run

    def unscaled(
        self: executor.PipelineExecutor, microbatches: Any, loss_scale: Tensor, head: Any = None
    ) -> Tensor | None:
        return run(self, microbatches, loss_scale * len(microbatches), head)

    return patch.object(executor.PipelineExecutor, "run", unscaled)


def _double_tied_weight() -> Any:
    """Sum the gradients of a tied embedding's copies twice."""
    once = engine.Engine._sum_tied_gradients

    def twice(self: engine.Engine) -> None:
        once(self)
        once(self)

    return patch.object(engine.Engine, "_sum_tied_gradients", twice)


FAULTS: dict[str, Callable[[], Any]] = {
    "drop-tp-allreduce": _drop_tp_allreduce,
    "mean-of-means": _mean_of_means,
    "drop-partial-sum": _drop_partial_sum,
    "zigzag-order": _zigzag_order,
    "unscaled-accumulation": _unscaled_accumulation,
    "double-tied-weight": _double_tied_weight,
}


@contextmanager
def fault(name: str | None) -> Iterator[None]:
    """Run with one of :data:`FAULTS`; None = without."""
    if name is None:
        yield
        return
    with FAULTS[name]():
        yield
