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


FAULTS: dict[str, Callable[[], Any]] = {
    "drop-tp-allreduce": _drop_tp_allreduce,
    "mean-of-means": _mean_of_means,
    "drop-partial-sum": _drop_partial_sum,
}


@contextmanager
def fault(name: str | None) -> Iterator[None]:
    """Run with one of :data:`FAULTS`; None = without."""
    if name is None:
        yield
        return
    with FAULTS[name]():
        yield
