"""Samples of a step as the tensors that one data-parallel rank trains on."""

from __future__ import annotations

import torch

from hpjob.runtime.data.tokens import TokenDataset
from hpjob.runtime.engine import Batch


class BatchReader:
    """Reads the part of one data-parallel rank; keeps no position, the step says it all.

    Args:
        dataset: Samples.
        dp_rank: Position on the data-parallel axis.
        dp_size: Its size; divides the global batch.
        device: Where the tensors go.
    """

    def __init__(self, dataset: TokenDataset, dp_rank: int, dp_size: int, device: torch.device) -> None:
        self._dataset = dataset
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._device = device

    def positions(self, step: int) -> tuple[int, int]:
        """Return the first and last sample of a step's global batch, counted over the whole run from 0."""
        size = self._dataset.global_batch_size
        return (step - 1) * size, step * size - 1

    def read(self, step: int) -> Batch:
        """Return the batch of a step (1-based); every tensor is ``(global_batch_size / dp_size, seq_length)``."""
        inputs, labels = self._dataset.rows(step, self._dp_rank, self._dp_size)
        positions = torch.arange(inputs.shape[1]).expand(inputs.shape[0], -1)
        return Batch(
            input_ids=torch.from_numpy(inputs).contiguous().to(self._device),
            labels=torch.from_numpy(labels).contiguous().to(self._device),
            position_ids=positions.contiguous().to(self._device),
        )
