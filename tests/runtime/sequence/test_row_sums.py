"""Sums and merges of rows: rounded once, whatever the number of ranks, compiled or not."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hpjob.runtime.sequence import gradient_courier, row_sums
from hpjob.runtime.sequence.block_attention import BlockSettings, CpuFlashBackend
from hpjob.runtime.sequence.message_buffers import MessageBuffers
from hpjob.runtime.sequence.ring import Ring
from hpjob.runtime.sequence.ring_attention import ring_attention
from hpjob.runtime.sequence.row_sums import RowSum, rescale_and_add, write_copy, write_sum, write_weighted_sum
from hpjob.runtime.sequence.zigzag import zigzag_block, zigzag_split
from tests.runtime.gloo_pool import GlooPool
from tests.runtime.sequence.attention_reference import make_inputs, relative_error
from tests.runtime.sequence.test_ring_attention import FOUR_KV, MHA, Case, check, errors_of_ring

BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_one_part_stays_and_more_are_summed_in_fp32(dtype: torch.dtype) -> None:
    buffers = MessageBuffers()
    parts = [torch.randn(2, 6, 3, 8).to(dtype) for _ in range(4)]
    copies = [part.clone() for part in parts]
    total = RowSum(buffers)
    total.add(None)
    total.add(parts[0])
    assert total.value is parts[0]
    for number, part in enumerate(parts[1:], 2):
        total.add(part)
        assert total.value is not None and total.value.dtype == torch.float32
        expected = torch.stack([each.float() for each in parts[:number]]).sum(0)
        torch.testing.assert_close(total.value, expected, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(parts, copies, strict=True))
    assert (buffers.num_made, buffers.num_in_use) == (1, 1)


def test_an_arrived_sum_is_added_to_in_its_own_memory() -> None:
    buffers = MessageBuffers()
    arrived = buffers.take((1, 2, 1, 4), torch.float32, torch.device("cpu")).fill_(1.0)
    total = RowSum(buffers, torch.full((1, 2, 1, 4), 2.0, dtype=BF16))
    total.add(arrived)
    assert total.value is arrived
    assert bool((arrived == 3).all())
    assert buffers.num_made == 1


def exact_results(rank: int, world: int) -> list[torch.Tensor]:
    """out, dq, dk, dv of a rank from the kernel's bf16 blocks, summed in fp32 and rounded once."""
    backend, length = CpuFlashBackend(), MHA[3] // world
    ranks = [[zigzag_split(t, r, world, dim=2) for t in make_inputs(MHA, BF16)] for r in range(world)]
    scale = MHA[4] ** -0.5
    sums: list[list[torch.Tensor]] = []
    for own, (q, _, _, _) in enumerate(ranks):
        blocks = [zigzag_block(own, source, length) for source in range(world)]
        outs, lses = [], []
        for (_, k, v, _), b in zip(ranks, blocks, strict=True):
            settings = BlockSettings(scale=scale, is_causal=b.is_causal)
            out, lse = backend.forward(q[:, :, b.queries], k[:, :, b.keys], v[:, :, b.keys], settings)
            outs.append(torch.zeros(q.shape).index_copy(2, torch.arange(length)[b.queries], out.float()))
            lses.append(torch.full(q.shape[:3], -torch.inf).index_copy(2, torch.arange(length)[b.queries], lse))
        lse = torch.stack(lses).logsumexp(0)
        merged = sum(out * torch.exp(each - lse)[..., None] for out, each in zip(outs, lses, strict=True))
        assert isinstance(merged, torch.Tensor)
        sums.append([merged.to(BF16), lse, *(torch.zeros_like(t, dtype=torch.float32) for t in ranks[own][:3])])
    for own, (q, _, _, grad_out) in enumerate(ranks):
        for source, (_, k, v, _) in enumerate(ranks):
            b = zigzag_block(own, source, length)
            settings = BlockSettings(scale=scale, is_causal=b.is_causal)
            rows = [t[:, :, b.queries] for t in (grad_out, q)]
            keys = [t[:, :, b.keys] for t in (k, v)]
            results = [t[:, :, b.queries] for t in sums[own][:2]]
            dq, dk, dv = backend.backward(*rows, *keys, *results, settings)
            sums[own][2][:, :, b.queries] += dq
            sums[source][3][:, :, b.keys] += dk
            sums[source][4][:, :, b.keys] += dv
    return [sums[rank][0], *(total.to(BF16) for total in sums[rank][2:])]


def errors_of_rounding(group: dist.ProcessGroup, is_widened: bool) -> list[float]:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    *leaves, grad_out = (zigzag_split(t, rank, world, dim=2) for t in make_inputs(MHA, BF16))

    def narrow(first: torch.Tensor, *_: torch.Tensor) -> torch.dtype:
        return first.dtype

    used = row_sums.sum_dtype if is_widened else narrow
    with mock.patch.object(row_sums, "sum_dtype", used), mock.patch.object(gradient_courier, "sum_dtype", used):
        out = ring_attention(*(leaf.requires_grad_() for leaf in leaves), Ring(group=group), backend=CpuFlashBackend())
        actual = (out, *torch.autograd.grad(out, leaves, grad_out))
    return [relative_error(a, e) for a, e in zip(actual, exact_results(rank, world), strict=True)]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bf16_results_are_rounded_once(pool: GlooPool, world: int) -> None:
    for errors in pool.run(errors_of_rounding, world, True):
        assert max(errors) <= 2e-4


def test_sums_that_are_not_widened_are_noticed(pool: GlooPool) -> None:
    every = pool.run(errors_of_rounding, 4, False)
    assert min(max(errors[1:]) for errors in every) > 5e-4


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Compiled as on CUDA; the list gets an entry for each graph."""
    made: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        made.append(len(made))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend, fullgraph=True))
    monkeypatch.setattr(row_sums, "_COMPILED_DEVICES", ("cpu",))
    row_sums._compiled.cache_clear()
    yield made
    row_sums._compiled.cache_clear()
    torch._dynamo.reset()


def test_one_graph_for_all_numbers_of_rows_and_parts_of_heads(graphs: list[int]) -> None:
    for batch, rows in ((2, 8), (1, 12), (3, 30)):
        for heads in (slice(0, 2), slice(2, 4)):
            out = torch.zeros(batch, 2 * rows, 4, 16, dtype=BF16)
            part, other = torch.randn(batch, 2 * rows, 2, 16).to(BF16), torch.randn(batch, rows, 4, 16)
            write_sum(out[:, rows:, heads], part[:, rows:], other[:, :, heads])
            write_copy(out[:, :rows, heads], part[:, :rows])
            expected = torch.zeros_like(out)
            expected[:, :rows, heads] = part[:, :rows]
            expected[:, rows:, heads] = (part[:, rows:].float() + other[:, :, heads]).to(BF16)
            assert torch.equal(out, expected)
    assert len(graphs) == 2


def test_compiled_merges_equal_plain_ones(graphs: list[int]) -> None:
    total, part = torch.randn(2, 8, 4, 16).to(BF16), torch.randn(2, 8, 4, 16).to(BF16)
    weight, part_weight = torch.rand(2, 8, 4), torch.rand(2, 8, 4)
    expected = total.float() * weight[..., None] + part.float() * part_weight[..., None]
    written = torch.empty(2, 8, 4, 16)
    write_weighted_sum(written, total, weight, part, part_weight)
    rescale_and_add(total, weight, part, part_weight)
    assert torch.equal(written, expected)
    assert torch.equal(total, expected.to(BF16))
    assert len(graphs) == 2


def test_sizes_that_are_no_multiple_of_a_vector_are_left_to_torch(graphs: list[int]) -> None:
    out, part = torch.zeros(1, 4, 3, 5, dtype=BF16), torch.ones(1, 4, 3, 5)
    write_sum(out, part, part)
    assert bool((out == 2).all())
    assert not graphs


def errors_with_compiler(group: dist.ProcessGroup, case: Case) -> list[float]:
    compiled = functools.partial(torch.compile, backend="aot_eager")
    with mock.patch.object(torch, "compile", compiled), mock.patch.object(row_sums, "_COMPILED_DEVICES", ("cpu",)):
        row_sums._compiled.cache_clear()
        errors = errors_of_ring(group, case)
        assert row_sums._compiled.cache_info().misses > 1
    row_sums._compiled.cache_clear()
    torch._dynamo.reset()
    return errors


@pytest.mark.parametrize("world", [2, 3])
def test_ring_with_compiled_sums_matches_whole_attention(pool: GlooPool, world: int) -> None:
    batch, heads, kv_heads, length, _ = FOUR_KV
    check(pool.run(errors_with_compiler, world, Case(shape=(batch, heads, kv_heads, length, 16))))
