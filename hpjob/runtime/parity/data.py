"""Batches for parity cases: learnable, and with unequal numbers of ignored labels."""

from __future__ import annotations

import torch

from hpjob.recipe.model import Recipe
from hpjob.runtime.engine import Batch
from hpjob.runtime.parallel.vocabulary import IGNORED_LABEL


def global_batch(recipe: Recipe, step: int, documents: int = 1) -> Batch:
    """Return the whole batch of a step, with that many unequal documents packed into each sequence.

    Tokens mostly follow a rule, so the loss falls. Sequence i ignores more labels than sequence i - 1 up to
    half of them: a mean over ranks or microbatches of their own means is then not the mean over tokens.
    """
    size, length, vocab = recipe.training.global_batch_size, recipe.data.seq_length, recipe.model.vocab_size
    generator = torch.Generator().manual_seed(recipe.data.seed * 100_003 + step)
    noise = torch.randint(0, vocab, (size, length + 1), generator=generator)
    follows = torch.rand(size, length + 1, generator=generator) < 0.8
    tokens = noise.clone()
    for t in range(1, length + 1):
        tokens[:, t] = torch.where(follows[:, t], (tokens[:, t - 1] * 3 + 1) % vocab, noise[:, t])
    labels = tokens[:, 1:].clone()
    for index in range(size):
        labels[index, : (index * 5) % (length // 2)] = IGNORED_LABEL
    positions = torch.arange(length).expand(size, length).contiguous()
    inputs = tokens[:, :-1].contiguous()
    if documents == 1:
        return Batch(input_ids=inputs, labels=labels, position_ids=positions)
    # Document d of sequence i begins at a place of its own.
    begins = torch.tensor(
        [[d * length // documents + (i + d) % 2 * (d > 0) for d in range(documents)] for i in range(size)]
    )
    numbers = (positions.unsqueeze(2) >= begins.unsqueeze(1)).sum(2) - 1
    return Batch(
        input_ids=inputs, labels=labels, position_ids=positions - begins.gather(1, numbers), document_ids=numbers
    )


def rank_batch(whole: Batch, dp_rank: int, dp_size: int) -> Batch:
    """Return the contiguous part of a batch that one data-parallel rank trains on."""
    size = len(whole.input_ids) // dp_size
    part = slice(dp_rank * size, (dp_rank + 1) * size)
    return Batch(
        input_ids=whole.input_ids[part],
        labels=whole.labels[part],
        position_ids=whole.position_ids[part],
        document_ids=None if whole.document_ids is None else whole.document_ids[part],
    )
