"""Samples of a step as the tensors that one data-parallel rank trains on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hpjob.runtime.data.documents import document_ids, document_positions
from hpjob.runtime.data.sample_log import SampleLog
from hpjob.runtime.data.tokens import TokenDataset
from hpjob.runtime.engine import Batch
from hpjob.runtime.parallel.vocabulary import IGNORED_LABEL


class BatchReader:
    """Reads the part of one data-parallel rank; keeps no position, the step says it all.

    With ``data.pack_documents`` a sample is a row of documents: an end-of-text token is the last of its own, positions
    begin anew behind it, and the label that it would have, another document's first token, is ignored.

    Args:
        dataset: Samples.
        dp_rank: Position on the data-parallel axis.
        dp_size: Its size; divides the global batch.
        device: Where the tensors go.
        log: Where the numbers of the samples are written.
    """

    def __init__(
        self, dataset: TokenDataset, dp_rank: int, dp_size: int, device: torch.device, log: SampleLog | None = None
    ) -> None:
        self._log = log
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
        inputs, labels = (torch.from_numpy(rows).contiguous() for rows in self._rows(step))
        documents = None
        if self._dataset.pack_documents:
            documents = document_ids(inputs, self._dataset.meta.eos_token_id)
            labels = labels.masked_fill(inputs == self._dataset.meta.eos_token_id, IGNORED_LABEL)
        positions = document_positions(torch.zeros_like(inputs) if documents is None else documents)
        return Batch(
            input_ids=inputs.to(self._device),
            labels=labels.to(self._device),
            position_ids=positions.to(self._device),
            document_ids=None if documents is None else documents.to(self._device),
        )

    def _rows(self, step: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if self._log is not None:
            self._log.append(step, self._dataset.sample_indices(step, self._dp_rank, self._dp_size))
        return self._dataset.rows(step, self._dp_rank, self._dp_size)
