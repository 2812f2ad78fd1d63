"""Ring attention whose messages are copied into the following rank's memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from hpjob.runtime.parallel.peer_memory import SideStream
from hpjob.runtime.sequence import peer_post
from hpjob.runtime.sequence.peer_post import PeerPost, peer_posts
from hpjob.runtime.sequence.ring import Ring, circulate
from hpjob.runtime.sequence.ring_attention import ring_attention
from tests.runtime.file_memory import FileMemory, HastyFileMemory
from tests.runtime.gloo_pool import GlooPool
from tests.runtime.sequence.stream_order import (
    CURRENT,
    Access,
    NotedMemory,
    NotedOperations,
    NotedSide,
    Notes,
    unordered,
)

CPU = torch.device("cpu")
HEADS, HEAD_DIM = 4, 8
NUM_LAYERS = 2

Call = tuple[int, int, int, torch.dtype]
"""Batch, local sequence, kv heads, dtype."""
CALLS: list[Call] = [(1, 16, 2, torch.bfloat16), (2, 24, HEADS, torch.bfloat16), (2, 8, 2, torch.float32)]


def trained(ring: Ring, call: Call, *, has_operator: bool) -> list[torch.Tensor]:
    """Layers one after the other, of which one is computed again in the backward pass: output and all gradients.

    ``has_operator``: Another one is an operator, as in compiled code.
    """
    batch, length, kv_heads, dtype = call
    generator = torch.Generator().manual_seed(100 * ring.rank + length)
    x, grad_out = (
        torch.randn(batch, length, HEADS, HEAD_DIM, generator=generator).to(dtype).transpose(1, 2) for _ in range(2)
    )
    x.requires_grad_()
    shape = (batch, length, kv_heads, HEAD_DIM)
    leaves = [x]
    value = x
    for layer in range(NUM_LAYERS):
        k, v = (torch.randn(shape, generator=generator).to(dtype).transpose(1, 2).requires_grad_() for _ in range(2))
        keys, values = k + value[:, :kv_heads], v * value[:, -kv_heads:]
        if layer == 1:
            out: Any = checkpoint(ring_attention, value, keys, values, ring, use_reentrant=False)
        elif has_operator:
            operator = torch.ops.hpjob.ring_attention.default
            out = operator(value, keys, values, None, ring.number, HEAD_DIM**-0.5, None)[0].transpose(1, 2)
        else:
            out = ring_attention(value, keys, values, ring)
        value = value + out
        leaves += [k, v]
    return [value.detach(), *torch.autograd.grad(value, leaves, grad_out)]


def peer_ring(
    group: dist.ProcessGroup, folder: str, allocated: list[int] | None = None, memory: Any = FileMemory
) -> Ring:
    side = SideStream(CPU)

    def allocate(kind: str, num_bytes: int) -> FileMemory:
        if allocated is not None:
            allocated.append(num_bytes)
        (Path(folder) / kind).mkdir(exist_ok=True)
        result: FileMemory = memory(group, f"{folder}/{kind}", num_bytes)
        return result

    visitor_post, sum_post = (PeerPost(group, partial(allocate, kind), CPU, side) for kind in ("visitors", "sums"))
    return Ring(group=group, visitor_post=visitor_post, sum_post=sum_post)


def differing(group: dist.ProcessGroup, folder: str) -> tuple[list[Any], list[int]]:
    """Calls in which the posts give anything else than the group, and the sizes of memory on the way."""
    allocated: list[int] = []
    plain, ring = Ring(group=group), peer_ring(group, folder, allocated)
    with mock.patch.object(dist, "batch_isend_irecv", side_effect=AssertionError):
        actual = [trained(ring, call, has_operator=True) for call in CALLS]
    assert ring.buffers.num_in_use == 0
    expected = [trained(plain, call, has_operator=True) for call in CALLS]
    wrong = [
        call
        for call, ours, theirs in zip(CALLS, actual, expected, strict=True)
        if not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    ]
    return wrong, allocated


@pytest.mark.parametrize("world", [2, 4])
def test_posts_give_the_bits_of_the_group_and_grow(pool: GlooPool, world: int, tmp_path: Path) -> None:
    visitors, sums = [], []
    for batch, length, kv_heads, dtype in CALLS:
        num_slots = min(2, world - 1)
        elements = num_slots * 2 * batch * length * kv_heads * HEAD_DIM
        visitors.append(elements * dtype.itemsize)
        # One contribution travels as the kernel gave it, which on CPUs is fp32 where query heads share a kv head.
        sums.append(elements * (dtype.itemsize if world == 2 and kv_heads == HEADS else 4))
    expected: list[int] = []
    for call in range(len(CALLS)):
        expected += [sizes[call] for sizes in (visitors, sums) if sizes[call] > max(sizes[:call], default=0)]
    for wrong, allocated in pool.run(differing, world, str(tmp_path)):
        assert not wrong
        assert allocated == expected


def first_arrival(group: dist.ProcessGroup, folder: str, memory: type[FileMemory]) -> float:
    """What the last rank gets in its first message, which the rank before it sends late."""
    ring = peer_ring(group, folder, memory=memory)
    is_late = memory is HastyFileMemory and ring.rank != ring.size - 1
    if is_late:
        dist.barrier(group=group)
    _, (_, _, (visitor,)) = circulate(ring, torch.full((4,), 1.0 + ring.rank))
    arrived = float(visitor[0])
    if memory is HastyFileMemory and not is_late:
        dist.barrier(group=group)
    return arrived


def test_ranks_that_do_not_meet_read_what_was_there_before(pool: GlooPool, tmp_path: Path) -> None:
    assert pool.run(first_arrival, 2, str(tmp_path), FileMemory)[1] == 1.0
    (tmp_path / "hasty").mkdir()
    assert pool.run(first_arrival, 2, str(tmp_path / "hasty"), HastyFileMemory)[1] == 0.0


def noted(group: dist.ProcessGroup, folder: str, left_out: int | None, most_slots: int, is_one_post: bool) -> list[Any]:
    """What this rank queues."""
    notes = Notes(group.rank())
    side: Any = NotedSide(notes)

    def post(kind: str) -> PeerPost:
        home = Path(folder) / kind
        home.mkdir(exist_ok=True)
        return PeerPost(group, partial(NotedMemory, group, str(home), notes, left_out), CPU, side)

    with mock.patch.object(peer_post, "_MOST_SLOTS", most_slots):
        visitor_post, sum_post = post("visitors"), post("sums")
    ring = Ring(group=group, visitor_post=visitor_post, sum_post=visitor_post if is_one_post else sum_post)
    with NotedOperations(notes):
        trained(ring, (1, 16, HEADS, torch.bfloat16), has_operator=False)
    return notes.entries


@pytest.mark.parametrize("world", [2, 3, 4])
def test_streams_leave_no_slot_to_chance(pool: GlooPool, world: int, tmp_path: Path) -> None:
    notes = pool.run(noted, world, str(tmp_path), None, 2, False)
    assert sum(entry == ("meet", 0) for entry in notes[0]) == 2 * (world - 1) * (3 * NUM_LAYERS + 1)
    # What arrives is read in the slots of both kinds.
    accesses = [entry for entry in notes[0] if isinstance(entry, Access) and entry.stream == CURRENT]
    assert {access.place for access in accesses if access.place[0] >= 0} == {(0, 0), (1, 0)}
    assert not any(access.writes for access in accesses if access.place[0] >= 0)
    assert unordered(notes) == []


@pytest.mark.parametrize(
    ("world", "left_out", "most_slots", "is_one_post"),
    [(2, 0, 2, False), (2, 1, 2, False), (3, None, 1, False), (4, None, 2, True)],
    ids=["no meeting before copies", "no meeting after copies", "one slot", "one post for both kinds"],
)
def test_less_would_not_do(
    pool: GlooPool, world: int, left_out: int | None, most_slots: int, is_one_post: bool, tmp_path: Path
) -> None:
    assert unordered(pool.run(noted, world, str(tmp_path), left_out, most_slots, is_one_post))


def choices(group: dist.ProcessGroup, folder: str) -> list[Any]:
    post = peer_ring(group, folder).visitor_post
    assert post is not None
    with pytest.raises(ValueError, match="one plain ring"):
        Ring(group=group, inner_size=1, visitor_post=post)
    with pytest.raises(ValueError, match="larger than the room"):
        post.send([torch.zeros(1000)], [((1000,), torch.float32)], [((10,), torch.float32)])
    return [peer_posts(group, CPU, 2)]


def test_ranks_that_reach_no_memory_have_no_posts(pool: GlooPool, tmp_path: Path) -> None:
    assert pool.run(choices, 2, str(tmp_path)) == [[None]] * 2


def kept(group: dist.ProcessGroup, folder: str) -> list[float]:
    """Visitors that the caller keeps are not in slots."""
    ring = peer_ring(group, folder)
    visitors = [visitor for _, _, (visitor,) in circulate(ring, torch.full((4,), float(ring.rank)), is_kept=True)]
    return [float(visitor[0]) for visitor in visitors]


def test_what_is_kept_is_never_overwritten(pool: GlooPool, tmp_path: Path) -> None:
    expected = [[float((rank - step) % 4) for step in range(4)] for rank in range(4)]
    assert pool.run(kept, 4, str(tmp_path)) == expected
