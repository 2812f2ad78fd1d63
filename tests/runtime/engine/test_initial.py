"""Initial weights do not depend on the layout."""

from __future__ import annotations

import torch

from hpjob.runtime.model.initial import initial_region, initial_weight

NAME = "model.layers.0.mlp.up_proj.weight"


def test_a_region_is_that_part_of_the_whole() -> None:
    shape = (3000, 700)  # several blocks of rows
    whole = initial_weight(NAME, shape, seed=1, std=0.02)
    part = initial_region(NAME, shape, (1400, 33), (900, 61), seed=1, std=0.02)
    assert torch.equal(part, whole[1400:2300, 33:94])


def test_name_and_seed_decide() -> None:
    base = initial_weight(NAME, (64, 32), seed=1, std=0.02)
    assert torch.equal(base, initial_weight(NAME, (64, 32), seed=1, std=0.02))
    assert not torch.equal(base, initial_weight(NAME, (64, 32), seed=2, std=0.02))
    assert not torch.equal(base, initial_weight(NAME.replace("0", "1"), (64, 32), seed=1, std=0.02))


def test_distribution() -> None:
    values = initial_weight(NAME, (2048, 1024), seed=1, std=0.02)
    assert abs(values.mean().item()) < 1e-4
    assert abs(values.std().item() - 0.02) < 1e-4
    blocks = values.view(2, 1024, 1024)
    assert not torch.equal(blocks[0], blocks[1])


def test_gains_start_at_one_and_biases_at_zero() -> None:
    assert initial_weight("model.norm.weight", (8,), seed=1, std=0.02).tolist() == [1.0] * 8
    assert initial_weight("q_proj.bias", (8,), seed=1, std=0.02).tolist() == [0.0] * 8


def test_an_empty_region() -> None:
    assert initial_region(NAME, (5, 4), (5, 0), (0, 4), seed=1, std=0.02).shape == (0, 4)
