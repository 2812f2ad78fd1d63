"""Zigzag ring attention against plain attention over the whole sequence, on 1 to 4 gloo ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from hpjob.core.errors import UserInputError
from hpjob.runtime.sequence import ring as ring_module
from hpjob.runtime.sequence import ring_passes
from hpjob.runtime.sequence.block_attention import AttentionBackend, CpuFlashBackend, MathBackend
from hpjob.runtime.sequence.ring import Ring
from hpjob.runtime.sequence.ring_attention import ring_attention
from hpjob.runtime.sequence.sequence_mask import SequenceMask
from hpjob.runtime.sequence.zigzag import zigzag_split
from tests.runtime.gloo_pool import GlooPool
from tests.runtime.sequence.attention_reference import full_attention, make_inputs, relative_error

Shape = tuple[int, int, int, int, int]
GQA: Shape = (2, 4, 2, 48, 8)
MHA: Shape = (1, 3, 3, 24, 8)
ODD: Shape = (3, 6, 2, 72, 5)
ONE_KV: Shape = (2, 4, 1, 48, 8)
FOUR_KV: Shape = (1, 8, 4, 48, 8)


def documents(batch: int, length: int) -> torch.Tensor:
    """Rows with documents of different lengths, some shorter than a chunk and some longer than a rank's part."""
    cuts = torch.tensor([[length // 9, length // 5, 3 * length // 4], [length // 2, length // 2 + 1, length - 2]])
    position = torch.arange(length)
    return (position[None, None] >= cuts[:batch, :, None].expand(batch, 3, 1)).sum(1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One ring and what goes round it."""

    shape: Shape = GQA
    dtype: torch.dtype = torch.float32
    backend: AttentionBackend | None = None
    inner_size: int | None = None
    second_group: bool = False
    packed: bool = False
    sliding_window: int | None = None
    split: Any = zigzag_split


def errors_of_ring(group: dist.ProcessGroup, case: Case) -> list[float]:
    """Relative errors of out, dq, dk, dv of this rank's part."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    whole = make_inputs(case.shape, case.dtype)
    ids = documents(case.shape[0], case.shape[3]) if case.packed else None
    window = case.sliding_window
    expected = full_attention(*whole, document_ids=ids, sliding_window=window)
    q, k, v, grad_out = (case.split(tensor, rank, size, dim=2) for tensor in whole)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    mask = SequenceMask(document_ids=ids, sliding_window=window) if case.packed or window else None
    outer_group = dist.new_group(list(range(size))) if case.second_group else None
    ring = Ring(group=group, inner_size=case.inner_size, outer_group=outer_group)
    out = ring_attention(*leaves, ring, mask=mask, backend=case.backend)
    assert out.dtype == case.dtype
    actual = (out, *torch.autograd.grad(out, leaves, grad_out))
    return [relative_error(a, case.split(e, rank, size, dim=2)) for a, e in zip(actual, expected, strict=True)]


def check(errors_of_ranks: list[list[float]], forward: float = 1e-6, gradients: float = 2e-6) -> None:
    for errors in errors_of_ranks:
        assert errors[0] <= forward
        assert max(errors[1:]) <= gradients


@pytest.mark.parametrize("shape", [GQA, MHA, ODD, ONE_KV], ids=["gqa", "mha", "odd", "one kv head"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_fp32_matches_whole_attention(pool: GlooPool, world: int, shape: Shape) -> None:
    check(pool.run(errors_of_ring, world, Case(shape=shape)))


@pytest.mark.parametrize("world", [2, 3])
def test_math_backend_matches_whole_attention(pool: GlooPool, world: int) -> None:
    check(pool.run(errors_of_ring, world, Case(backend=MathBackend())))


@pytest.mark.parametrize("world", [2, 4])
def test_bf16_stays_within_its_rounding(pool: GlooPool, world: int) -> None:
    check(pool.run(errors_of_ring, world, Case(dtype=torch.bfloat16)), forward=4e-3, gradients=8e-3)


@pytest.mark.parametrize("shape", [GQA, ONE_KV, FOUR_KV], ids=["gqa", "one kv head", "four kv heads"])
@pytest.mark.parametrize("inner_size", [1, 2, 4])
def test_ring_of_rings_matches_whole_attention(pool: GlooPool, inner_size: int, shape: Shape) -> None:
    check(pool.run(errors_of_ring, 4, Case(shape=shape, inner_size=inner_size)))


def test_ring_of_rings_with_its_own_group_between_nodes(pool: GlooPool) -> None:
    case = Case(shape=FOUR_KV, dtype=torch.bfloat16, inner_size=2, second_group=True)
    check(pool.run(errors_of_ring, 4, case), 4e-3, 8e-3)


@pytest.mark.parametrize("backend", [CpuFlashBackend(), MathBackend()], ids=["flash", "math"])
@pytest.mark.parametrize("world", [2, 3])
def test_packed_documents_do_not_see_each_other(pool: GlooPool, world: int, backend: AttentionBackend) -> None:
    check(pool.run(errors_of_ring, world, Case(backend=backend, packed=True)))


def test_sliding_window_inside_the_ring(pool: GlooPool) -> None:
    check(pool.run(errors_of_ring, 4, Case(inner_size=2, packed=True, sliding_window=7)))


def contiguous_split(tensor: torch.Tensor, rank: int, size: int, *, dim: int) -> torch.Tensor:
    return tensor.chunk(size, dim=dim)[rank].contiguous()


def test_wrong_order_is_noticed(pool: GlooPool) -> None:
    errors = pool.run(errors_of_ring, 2, Case(split=contiguous_split))
    assert max(max(e) for e in errors) > 1e-2


def errors_with_local_kv_in_backward(group: dist.ProcessGroup) -> list[float]:
    """The ring, but its backward works on the rank's own K and V at every step."""
    original = ring_module.circulate

    def stay_in_backward(ring: Ring, *tensors: torch.Tensor) -> Any:
        stay_in_backward.calls += 1
        for outer_step, inner_step, visiting in original(ring, *tensors):
            yield outer_step, inner_step, visiting if stay_in_backward.calls == 1 else tensors

    stay_in_backward.calls = 0
    with mock.patch("hpjob.runtime.sequence.ring_passes.circulate", stay_in_backward):
        return errors_of_ring(group, Case())


def errors_with_swapped_halves(group: dist.ProcessGroup) -> list[float]:
    """The ring, but what it adds to the early keys goes to the late ones and the other way round."""
    original = ring_passes._key_halves

    def swapped(*arguments: Any) -> Any:
        early, late = original(*arguments)
        return (early, late) if late is None else (late, early)

    with mock.patch.object(ring_passes, "_key_halves", swapped):
        return errors_of_ring(group, Case())


def test_swapped_halves_are_noticed(pool: GlooPool) -> None:
    every = pool.run(errors_with_swapped_halves, 2)
    assert max(max(errors[2:]) for errors in every) > 1e-2
    assert max(max(errors[:2]) for errors in every) < 2e-6


def test_local_kv_in_backward_is_noticed(pool: GlooPool) -> None:
    for out, dq, dk, dv in pool.run(errors_with_local_kv_in_backward, 3):
        assert out < 1e-6
        assert min(dq, dk, dv) > 1e-2


class NoHostReads(TorchDispatchMode):
    """Refuses operations that make the host wait for values on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "item"}
        return func(*args, **(kwargs or {}))


def run_without_host_reads(group: dist.ProcessGroup, packed: bool) -> bool:
    q, k, v, grad_out = (tensor[:, :, :12].contiguous() for tensor in make_inputs(GQA, torch.float32))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    length = 12 * dist.get_world_size(group)
    mask = SequenceMask(document_ids=documents(GQA[0], length)) if packed else None
    with NoHostReads():
        with pytest.raises(AssertionError):
            bool(grad_out.sum() > 0)
        out = ring_attention(*leaves, Ring(group=group), mask=mask)
        torch.autograd.backward(out, grad_out)
    return all(leaf.grad is not None for leaf in leaves)


@pytest.mark.parametrize("packed", [False, True], ids=["causal", "packed"])
def test_the_host_never_waits_for_the_device(pool: GlooPool, packed: bool) -> None:
    assert pool.run(run_without_host_reads, 3, packed) == [True] * 3


def refusals(group: dist.ProcessGroup) -> list[str]:
    messages = []
    for call in (
        lambda: Ring(group=group, inner_size=3),
        lambda: ring_attention(*(torch.zeros(1, heads, 4, 8) for heads in (3, 2, 2)), Ring(group=group)),
        lambda: ring_attention(*(torch.zeros(1, 2, 5, 8) for _ in range(3)), Ring(group=group)),
        lambda: ring_attention(
            *(torch.zeros(1, 2, 4, 8) for _ in range(3)),
            Ring(group=group),
            mask=SequenceMask(sliding_window=2),
            backend=UnmaskedBackend(),
        ),
    ):
        with pytest.raises(UserInputError) as error:
            call()
        assert error.value.hint
        messages.append(error.value.message)
    return messages


class UnmaskedBackend(MathBackend):
    name = "unmasked"
    supports_bias = False


def test_wrong_settings_are_refused_in_words(pool: GlooPool) -> None:
    inner, heads, length, mask = pool.run(refusals, 4)[0]
    assert "does not divide sp_size 4" in inner
    assert "3 heads are no multiple of 2 kv heads" in heads
    assert "even number of tokens" in length
    assert "'unmasked' cannot mask packed documents" in mask
