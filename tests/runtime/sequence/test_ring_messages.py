"""What travels round the ring, when, in which dtype, and in whose memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hpjob.runtime.sequence.block_attention import BlockSettings, CpuFlashBackend, Gradients
from hpjob.runtime.sequence.message_buffers import MessageBuffers
from hpjob.runtime.sequence.messages import GroupMessage
from hpjob.runtime.sequence.ring import Ring
from hpjob.runtime.sequence.ring_attention import ring_attention
from hpjob.runtime.sequence.sequence_mask import SequenceMask
from tests.runtime.gloo_pool import GlooPool
from tests.runtime.sequence.attention_reference import make_inputs
from tests.runtime.sequence.test_ring_attention import FOUR_KV, GQA, MHA, ONE_KV, Case, Shape, check, errors_of_ring


@contextmanager
def noted_messages(log: list[Any]) -> Iterator[None]:
    """Append the tensors that each message of this rank sends; they must be the same when it was waited for."""
    original = dist.batch_isend_irecv

    def noting(operations: list[Any]) -> list[Any]:
        sent = [op.tensor for op in operations if op.op is dist.isend]
        copies = [tensor.clone() for tensor in sent]
        log.append(copies)
        works = original(operations)
        final = works[-1].wait

        def wait() -> Any:
            result = final()
            torch.testing.assert_close(sent, copies, rtol=0, atol=0, equal_nan=True)
            return result

        return [*works[:-1], mock.Mock(wait=wait)]

    with mock.patch.object(dist, "batch_isend_irecv", noting):
        yield


def local_inputs(shape: Shape, dtype: torch.dtype, size: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Leaves as linear layers make them, (batch, sequence, heads, head_dim) in memory; gradient of the output."""
    batch, heads, kv_heads, length, head_dim = shape
    inputs = make_inputs((batch, heads, kv_heads, length // size, head_dim), dtype)
    *leaves, grad_out = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs)
    return [leaf.requires_grad_() for leaf in leaves], grad_out


def sent_forms(
    group: dist.ProcessGroup, shape: Shape, dtype: torch.dtype, inner_size: int | None
) -> tuple[list[list[tuple[int, str]]], list[list[tuple[int, str]]]]:
    """Elements and dtype of each tensor of each message, forward and backward."""
    leaves, grad_out = local_inputs(shape, dtype, dist.get_world_size(group))
    forward: list[Any] = []
    backward: list[Any] = []
    with noted_messages(forward):
        out = ring_attention(*leaves, Ring(group=group, inner_size=inner_size))
    with noted_messages(backward):
        out.backward(grad_out)
    first, second = ([[(t.numel(), str(t.dtype)) for t in message] for message in log] for log in (forward, backward))
    return first, second


@pytest.mark.parametrize("inner_size", [None, 2])
def test_messages_are_kv_sized(pool: GlooPool, inner_size: int | None) -> None:
    batch, _, kv_heads, length, head_dim = GQA
    world = 4
    elements = batch * kv_heads * length // world * head_dim
    for forward, backward in pool.run(sent_forms, world, GQA, torch.float32, inner_size):
        assert forward == [[(elements, "torch.float32")] * 2] * (world - 1)
        # What a rank adds for its own tensor stays, and so does what comes from its own inner ring.
        gradient_messages = world - 1 if inner_size is None else world - 1 + world // inner_size - 1
        assert len(backward) == world - 1 + gradient_messages
        assert all(sum(numel for numel, _ in message) <= 2 * elements for message in backward)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_one_contribution_travels_in_its_dtype_and_keys_without_any_do_not(pool: GlooPool, world: int) -> None:
    batch, _, kv_heads, length, head_dim = MHA
    half = batch * kv_heads * length // world * head_dim // 2
    expected: Counter[tuple[int, str]] = Counter()
    for source in range(world):
        passed = [(source + step) % world for step in range(1, world)]
        for number in range(1, world):
            # Ranks behind the source meet its early keys only.
            for contributions in (number, sum(rank < source for rank in passed[:number])):
                if contributions:
                    expected[half, "torch.bfloat16" if contributions == 1 else "torch.float32"] += 2
    actual: Counter[tuple[int, str]] = Counter()
    for _, backward in pool.run(sent_forms, world, MHA, torch.bfloat16, None):
        actual.update(form for message in backward for form in message if form[0] == half)
        assert sum(form == (2 * half, "torch.bfloat16") for message in backward for form in message) == 2 * (world - 1)
    assert actual == expected


class NotingBackend(CpuFlashBackend):
    """Writes the heads of each block of the backward pass into a log."""

    def __init__(self, log: list[Any]) -> None:
        self._log = log

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        settings: BlockSettings,
    ) -> Gradients:
        self._log.append(("own" if settings.is_causal else "visiting", k.shape[1]))
        return super().backward(grad_out, q, k, v, out, lse, settings)


def order_of_backward(group: dist.ProcessGroup, shape: Shape, inner_size: int | None) -> list[Any]:
    """Blocks with their kv heads and messages, in the order in which they are started."""
    leaves, grad_out = local_inputs(shape, torch.float32, dist.get_world_size(group))
    log: list[Any] = []
    out = ring_attention(*leaves, Ring(group=group, inner_size=inner_size), backend=NotingBackend(log))
    with noted_messages(log):
        out.backward(grad_out)
    return [entry if isinstance(entry, tuple) else "message" for entry in log]


def test_own_heads_hide_the_first_arrival_and_the_last_way_home(pool: GlooPool) -> None:
    expected = ["message", ("own", 2), ("visiting", 4), "message", ("own", 2)]
    assert pool.run(order_of_backward, 2, FOUR_KV, None) == [expected] * 2


def test_one_kv_head_is_not_split(pool: GlooPool) -> None:
    expected = ["message", ("own", 1), ("visiting", 1), "message"]
    assert pool.run(order_of_backward, 2, ONE_KV, None) == [expected] * 2


def test_in_a_ring_of_rings_own_heads_hide_both_ways_home(pool: GlooPool) -> None:
    for order in pool.run(order_of_backward, 4, FOUR_KV, 2):
        assert order[:3] == ["message", "message", ("own", 2)]
        assert order[-5:] == [("visiting", 4), "message", ("own", 1), "message", ("own", 1)]


CASES = [
    (2, Case()),
    (3, Case(shape=ONE_KV)),
    (4, Case(shape=FOUR_KV)),
    (4, Case(shape=FOUR_KV, inner_size=2)),
    (4, Case(inner_size=1)),
    (3, Case(packed=True)),
]


def errors_with_poison(group: dist.ProcessGroup, case: Case, is_early: bool) -> list[float]:
    """The ring, but a buffer that was given back holds no numbers any more; ``is_early``: as soon as it arrived."""
    original = MessageBuffers.give_back
    wait = GroupMessage.wait

    def poisoning(self: MessageBuffers, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if self.owns(tensor):
                tensor.fill_(float("nan"))
        original(self, *tensors)

    def giving_back(self: GroupMessage) -> tuple[torch.Tensor, ...]:
        received = wait(self)
        for tensor in received:
            tensor.fill_(float("nan"))
        return received

    log: list[Any] = []
    with (
        mock.patch.object(MessageBuffers, "give_back", poisoning),
        mock.patch.object(GroupMessage, "wait", giving_back if is_early else wait),
        noted_messages(log),
    ):
        return errors_of_ring(group, case)


@pytest.mark.parametrize(("world", "case"), CASES)
def test_nothing_reads_a_buffer_that_was_given_back(pool: GlooPool, world: int, case: Case) -> None:
    check(pool.run(errors_with_poison, world, case, False))


def test_a_buffer_given_back_too_early_is_noticed(pool: GlooPool) -> None:
    assert not any(max(errors) <= 1e-2 for errors in pool.run(errors_with_poison, 2, Case(), True))


def buffers_over_calls(group: dist.ProcessGroup, inner_size: int | None, packed: bool) -> list[tuple[int, int]]:
    """Buffers made and in use after each of three calls; results of a call outlive the next ones."""
    leaves, grad_out = local_inputs(FOUR_KV, torch.bfloat16, dist.get_world_size(group))
    ring = Ring(group=group, inner_size=inner_size)
    mask = SequenceMask(sliding_window=5) if packed else None
    figures, results, copies = [], [], []
    for _ in range(3):
        out = ring_attention(*leaves, ring, mask=mask)
        results += [out, *torch.autograd.grad(out, leaves, grad_out)]
        copies += [tensor.clone() for tensor in results[-4:]]
        figures.append((ring.buffers.num_made, ring.buffers.num_in_use))
    assert all(torch.equal(a, b) for a, b in zip(results, copies, strict=True))
    assert len({tensor.data_ptr() for tensor in results}) == len(results)
    return figures


@pytest.mark.parametrize(
    ("world", "inner_size", "packed"), [(2, None, False), (3, None, True), (4, None, False), (4, 2, False)]
)
def test_no_more_buffers_after_the_first_call(pool: GlooPool, world: int, inner_size: int | None, packed: bool) -> None:
    for first, *others in pool.run(buffers_over_calls, world, inner_size, packed):
        assert 0 < first[0] <= 24
        assert first[1] == 0
        assert others == [first] * 2
