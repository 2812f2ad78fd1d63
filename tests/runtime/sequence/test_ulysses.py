"""Ulysses attention: parity, kv heads that do not divide, collectives counted, refusals."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hpjob.core.errors import UserInputError
from hpjob.runtime.sequence.local_attention import local_attention
from hpjob.runtime.sequence.ulysses import ulysses_attention, ulysses_kv_heads
from tests.runtime.gloo_pool import GlooPool
from tests.runtime.sequence.attention_reference import full_attention, make_inputs, relative_error

Shape = tuple[int, int, int, int, int]


def errors_of_ulysses(
    group: dist.ProcessGroup, shape: Shape, dtype: torch.dtype = torch.float32, packed: bool = False
) -> list[float]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    whole = make_inputs(shape, dtype)
    ids = torch.arange(shape[3]).ge(shape[3] // 3).long().expand(shape[0], -1) if packed else None
    expected = full_attention(*whole, document_ids=ids)
    q, k, v, grad_out = (tensor.chunk(size, dim=2)[rank].contiguous() for tensor in whole)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = ulysses_attention(*leaves, group, lambda q, k, v: local_attention(q, k, v, document_ids=ids))
    actual = (out, *torch.autograd.grad(out, leaves, grad_out))
    return [relative_error(a, e.chunk(size, dim=2)[rank]) for a, e in zip(actual, expected, strict=True)]


CASES = [
    (2, (2, 4, 2, 10, 8)),
    (2, (1, 6, 1, 14, 5)),
    (3, (2, 6, 2, 21, 8)),
    (3, (1, 3, 3, 9, 8)),
    (4, (2, 8, 2, 12, 8)),
    (4, (1, 12, 3, 20, 8)),
]


@pytest.mark.parametrize(("world", "shape"), CASES)
def test_fp32_matches_whole_attention(pool: GlooPool, world: int, shape: Shape) -> None:
    for errors in pool.run(errors_of_ulysses, world, shape):
        assert errors[0] <= 1e-6
        assert max(errors[1:]) <= 2e-6


def test_packed_documents(pool: GlooPool) -> None:
    for errors in pool.run(errors_of_ulysses, 4, (2, 8, 4, 24, 8), torch.float32, True):
        assert max(errors) <= 2e-6


def test_bf16_stays_within_its_rounding(pool: GlooPool) -> None:
    for errors in pool.run(errors_of_ulysses, 4, (2, 8, 2, 12, 8), torch.bfloat16):
        assert max(errors) <= 8e-3


def collectives(group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """Elements of each all-to-all, forward and backward."""
    counts: list[int] = []
    original = dist.all_to_all_single

    def counting(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counts.append(output.numel())
        return original(output, *args, **kwargs)

    q, k, v, _ = (t[:, :, :4].contiguous().requires_grad_() for t in make_inputs((1, 8, 4, 16, 8), torch.float32))
    with mock.patch.object(dist, "all_to_all_single", counting):
        out = ulysses_attention(q, k, v, group, local_attention)
        forward = list(counts)
        counts.clear()
        out.sum().backward()
    return forward, counts


def test_four_collectives_each_way_with_kv_before_repetition(pool: GlooPool) -> None:
    query, kv = 8 * 4 * 8, 4 * 4 * 8
    for forward, backward in pool.run(collectives, 4):
        assert forward == [query, kv, kv, query]
        assert sorted(backward) == sorted(forward)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sp_size", "travelling"), [(32, 8, 4, 8), (32, 8, 16, 16), (12, 3, 4, 12), (6, 2, 3, 6)]
)
def test_kv_heads_are_replicated_only_as_far_as_needed(
    heads: int, kv_heads: int, sp_size: int, travelling: int
) -> None:
    assert ulysses_kv_heads(heads, kv_heads, sp_size) == travelling


def test_indivisible_heads_are_refused_with_the_legal_sizes() -> None:
    with pytest.raises(UserInputError, match="cannot spread 6 heads") as error:
        ulysses_kv_heads(6, 2, 4)
    assert "1, 2, 3, 6" in error.value.hint


def two_models(group: dist.ProcessGroup) -> list[float]:
    """Two objects with different kv heads used in turn: nothing is remembered from one to the other."""
    return [*errors_of_ulysses(group, (1, 8, 8, 8, 8)), *errors_of_ulysses(group, (1, 8, 2, 8, 8))]


def test_two_models_in_one_process(pool: GlooPool) -> None:
    assert max(max(errors) for errors in pool.run(two_models, 2)) <= 2e-6
