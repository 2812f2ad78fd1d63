"""Batches for parity cases: learnable, and with unequal numbers of ignored labels."""

from __future__ import annotations

import torch

from hpjob.recipe.model import Recipe
from hpjob.runtime.engine import Batch
from hpjob.runtime.parallel.vocabulary import IGNORED_LABEL


def global_batch(recipe: Recipe, step: int) -> Batch:
    """Return the whole batch of a step.

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
    return Batch(input_ids=tokens[:, :-1].contiguous(), labels=labels, position_ids=positions)


def rank_batch(whole: Batch, dp_rank: int, dp_size: int) -> Batch:
    """Return the contiguous part of a batch that one data-parallel rank trains on."""
    size = len(whole.input_ids) // dp_size
    part = slice(dp_rank * size, (dp_rank + 1) * size)
    return Batch(input_ids=whole.input_ids[part], labels=whole.labels[part], position_ids=whole.position_ids[part])
