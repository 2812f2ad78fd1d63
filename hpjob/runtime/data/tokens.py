"""Memory-mapped token files as samples; which sample comes when is a function of the step alone."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hpjob.core.errors import UserInputError
from hpjob.recipe.data_files import TOKENS_NAME, TokenFilesMeta, check_token_files, count_samples
from hpjob.recipe.model import Recipe
from hpjob.runtime.data.order import shuffled


class TokenDataset:
    """Samples of ``seq_length`` tokens in a shuffled order that any layout and any restart repeats.

    Position p of the run (0-based, over all steps) is sample ``shuffled(p % n, n, seed, p // n)``.
    The global batch of step s holds positions (s-1)*B … s*B-1; data-parallel rank r takes its
    contiguous part, so the parts of all ranks in order are the batch whatever the layout.

    Args:
        recipe: Names the folder, sample length, batch and seed.

    Raises:
        UserInputError: As :func:`hpjob.recipe.data_files.check_token_files`.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.seq_length = recipe.data.seq_length
        self.global_batch_size = recipe.training.global_batch_size
        self.seed = recipe.data.seed
        self.pack_documents = recipe.data.pack_documents
        self.meta: TokenFilesMeta = check_token_files(
            recipe.data.path, recipe.model.vocab_size, self.seq_length, self.global_batch_size
        )
        self.path = Path(recipe.data.path or "") / TOKENS_NAME
        dtype = np.dtype("<u2" if self.meta.dtype == "uint16" else "<u4")
        self._tokens: npt.NDArray[np.unsignedinteger] = np.memmap(self.path, dtype=dtype, mode="r")
        self.num_samples = count_samples(self.meta.num_tokens, self.seq_length)

    def sample(self, index: int) -> npt.NDArray[np.int64]:
        """Return ``seq_length + 1`` tokens: inputs are all but the last, labels all but the first."""
        start = index * self.seq_length
        return self._tokens[start : start + self.seq_length + 1].astype(np.int64)

    def sample_indices(self, step: int, dp_rank: int, dp_size: int) -> list[int]:
        """Return the samples of one data-parallel rank in a step (1-based)."""
        rows = self.global_batch_size // dp_size
        first = (step - 1) * self.global_batch_size + dp_rank * rows
        return [
            shuffled(p % self.num_samples, self.num_samples, self.seed, p // self.num_samples)
            for p in range(first, first + rows)
        ]

    def rows(self, step: int, dp_rank: int, dp_size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return inputs and shifted labels, both ``(global_batch_size / dp_size, seq_length)``."""
        samples = np.stack([self.sample(index) for index in self.sample_indices(step, dp_rank, dp_size)])
        return samples[:, :-1], samples[:, 1:]

    def verify_checksum(self) -> None:
        """Read the whole token file and compare it with its digest.

        Raises:
            UserInputError: The file changed after it was prepared.
        """
        with self.path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != self.meta.tokens_sha256:
            raise UserInputError(
                f"{self.path} changed after it was prepared: its checksum differs from meta.json",
                hint="prepare it again with `hpjob data prepare … --force`",
            )
