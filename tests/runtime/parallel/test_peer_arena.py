"""Gathers and sums of tensors in memory that ranks read directly."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hpjob.runtime.parallel.peer_arena import PeerArena, bytes_for
from tests.runtime.file_memory import FileMemory, HastyFileMemory
from tests.runtime.gloo_pool import GlooPool

SHAPES = [((12, 3), torch.bfloat16), ((12,), torch.bfloat16), ((24, 5), torch.float32), ((12,), torch.float32)]


def arena_of(group: dist.ProcessGroup, folder: str, *, meets: bool = True) -> PeerArena:
    memory = FileMemory if meets else HastyFileMemory
    return PeerArena(group, bytes_for(SHAPES), partial(memory, group, folder), torch.device("cpu"))


def exchanged(group: dist.ProcessGroup, folder: str, meets: bool) -> tuple[bool, bool]:
    """Whether gathered weights and summed chunks are right, over three rounds; ranks come at different times."""
    size, rank = group.size(), group.rank()
    arena = arena_of(group, folder, meets=meets)
    weights = [arena.place(*SHAPES[0]), arena.place(*SHAPES[1])]
    chunks = [weight.chunk(size)[rank] for weight in weights]
    sums = [arena.place(*SHAPES[2]), arena.place(*SHAPES[3])]
    gathers, reduces = True, True
    for turn in range(3):
        # As between a step and the next: what was gathered may change now.
        dist.barrier(group=group)
        time.sleep(0.1 * (rank if turn % 2 else size - rank))
        for tensor in weights:
            tensor.fill_(-1.0)
            tensor.chunk(size)[rank].fill_(10.0 * turn + rank)
        arena.start_all_gather(weights, chunks, has_news=True).wait()
        expected = 10.0 * turn + torch.arange(size).repeat_interleave(12 // size)
        gathers &= all(
            torch.equal(w, expected.to(w.dtype).view(12, *[1] * (w.dim() - 1)).expand_as(w)) for w in weights
        )
        for tensor in sums:
            tensor.fill_(float(turn + 2**rank))
        added = [torch.full_like(tensor.chunk(size)[rank], 7.0) for tensor in sums]
        arena.start_reduce_scatter(sums, added, is_first=turn == 0).wait()
        before = 0.0 if turn == 0 else 7.0
        reduces &= all((tensor == before + size * turn + 2**size - 1).all().item() for tensor in added)
        own = [tensor.chunk(size)[rank] for tensor in sums]
        arena.start_reduce_scatter(sums, own, is_first=False).wait()
        total = float(size * turn + 2**size - 1)
        reduces &= all((tensor.chunk(size)[rank] == total).all().item() for tensor in sums)
    return gathers, reduces


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gathers_and_sums(pool: GlooPool, world: int, tmp_path: Path) -> None:
    assert pool.run(exchanged, world, str(tmp_path), True) == [(True, True)] * world


def test_ranks_that_do_not_meet_read_too_early(pool: GlooPool, tmp_path: Path) -> None:
    found = pool.run(exchanged, 2, str(tmp_path), False)
    assert not all(gathers and reduces for gathers, reduces in found)


def placed(group: dist.ProcessGroup, folder: str) -> tuple[list[int], str]:
    arena = arena_of(group, folder)
    tensors = [arena.place(*shape) for shape in SHAPES]
    with pytest.raises(ValueError, match="does not fit") as refusal:
        arena.place((1,), torch.float32)
    return [tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors], str(refusal.value)


def test_tensors_are_aligned_and_the_arena_ends(pool: GlooPool, tmp_path: Path) -> None:
    for offsets, _ in pool.run(placed, 2, str(tmp_path)):
        assert offsets == [0, 256, 512, 1024]
