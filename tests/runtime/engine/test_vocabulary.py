"""Vocabulary-parallel embedding and cross entropy against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hpjob.runtime.parallel.linear import local_tensor
from hpjob.runtime.parallel.region import chunk_bounds
from hpjob.runtime.parallel.tensor_region import TensorRegion
from hpjob.runtime.parallel.vocabulary import IGNORED_LABEL, VocabularyParallelEmbedding, cross_entropy_sum
from hpjob.runtime.process_pool import ProcessPool

pytestmark = pytest.mark.distributed


def example(vocab: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, vocab, generator=generator) * 20
    labels = torch.randint(0, vocab, (2, 6), generator=generator)
    labels[0, :2] = IGNORED_LABEL
    return logits, labels


def loss_and_gradient(vocab: int) -> tuple[Tensor, Tensor]:
    logits, labels = example(vocab)
    begin, end = chunk_bounds(vocab, dist.get_world_size(), dist.get_rank())
    mine = logits[..., begin:end].clone().requires_grad_()
    assert dist.group.WORLD is not None
    loss = cross_entropy_sum(mine, labels, begin=begin, group=dist.group.WORLD)
    loss.backward()
    assert mine.grad is not None
    return loss.detach(), mine.grad


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("vocab", [64, 37, 7])
def test_cross_entropy(pool: ProcessPool, vocab: int, world: int) -> None:
    logits, labels = example(vocab)
    logits.requires_grad_()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    expected.backward()
    ranks = pool.run(loss_and_gradient, vocab, world=world)
    for loss, _ in ranks:
        torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(torch.cat([gradient for _, gradient in ranks], dim=-1), logits.grad)


def embed(vocab: int) -> tuple[Tensor, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    embedding = VocabularyParallelEmbedding(vocab, 3, region=TensorRegion(mesh=mesh))
    embedding.to_empty(device="cpu")
    with torch.no_grad():
        rows = torch.arange(embedding.begin, embedding.end, dtype=torch.float32)
        local_tensor(embedding.weight).copy_(rows.unsqueeze(1).expand(-1, 3))
    out = embedding(torch.arange(vocab).unsqueeze(0))
    (out * torch.arange(1.0, 4.0)).sum().backward()
    gradient = embedding.weight.grad
    assert gradient is not None
    return out.detach(), local_tensor(gradient)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("vocab", [8, 7])
def test_embedding(pool: ProcessPool, vocab: int, world: int) -> None:
    ranks = pool.run(embed, vocab, world=world)
    for out, _ in ranks:
        assert out[0, :, 0].tolist() == list(range(vocab))
    gradient = torch.cat([part for _, part in ranks])
    assert gradient.tolist() == [[1.0, 2.0, 3.0]] * vocab
