"""Small exchanges that keep all ranks of one mind: results, failures, the wish to stop.

An error that is raised on one rank alone would leave the others waiting in their next collective;
here every rank learns of it and raises together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from hpjob.runtime.signals import StopRequest

T = TypeVar("T")
U = TypeVar("U")


class AgreedError(Exception):
    """Work failed on at least one rank; raised on all of them with the same text."""


class StopAgreement:
    """Turns the stop request of any rank into one of all ranks, at points that all ranks reach."""

    def __init__(self, request: StopRequest) -> None:
        self._request = request

    def check(self) -> int:
        """Return the largest stop code of all ranks; 0 = go on. A collective."""
        return self.check_with(False)[0]

    def check_with(self, flag: bool) -> tuple[int, bool]:
        """Return the largest stop code, and whether ``flag`` is set on any rank. One collective for both."""
        both = torch.tensor([self._request.code(), int(flag)], dtype=torch.int64)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        code, any_flag = both.tolist()
        return int(code), bool(any_flag)


def wait_for_all() -> None:
    """Return when every rank has come here; on the CPU, so that no GPU is involved."""
    dist.all_reduce(torch.zeros(1, dtype=torch.int64))


def on_every_rank(work: Callable[[], T]) -> list[T]:
    """Run ``work`` on every rank and return all results, in the order of ranks, on every rank.

    ``work`` must not use collectives. Results travel pickled and should be small.

    Raises:
        AgreedError: It raised on some rank; the text names rank and error.
    """
    mine: tuple[T | None, str | None]
    try:
        mine = (work(), None)
    except Exception as error:
        mine = (None, _describe(error))
    gathered: list[tuple[T | None, str | None] | None] = [None] * dist.get_world_size()
    # Gather and broadcast, not all-gather: each rank's part travels twice, not once a rank.
    dist.gather_object(mine, gathered if dist.get_rank() == 0 else None, dst=0)
    box: list[object] = [gathered]
    dist.broadcast_object_list(box, src=0)
    results = cast(list[tuple[T, str | None]], box[0])
    failed = [text for _, text in results if text is not None]
    if failed:
        raise AgreedError("; ".join(failed[:3]) + (f"; and {len(failed) - 3} more" if len(failed) > 3 else ""))
    return [result for result, _ in results]


def on_rank_zero(work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 alone and return its result on every rank.

    Raises:
        AgreedError: It raised.
    """
    box: list[tuple[T | None, str | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            box = [(work(), None)]
        except Exception as error:
            box = [(None, _describe(error))]
    dist.broadcast_object_list(box, src=0)
    result, failure = box[0]
    if failure is not None:
        raise AgreedError(failure)
    return cast(T, result)


def scatter_from_rank_zero(work: Callable[[], T], distribute: Callable[[list[T]], list[U]]) -> U:
    """Run ``work`` on every rank, make one part a rank of all results on rank 0, and return each rank its part.

    Raises:
        AgreedError: Either raised on some rank.
    """
    try:
        mine: tuple[T | None, str | None] = (work(), None)
    except Exception as error:
        mine = (None, _describe(error))
    world = dist.get_world_size()
    gathered: list[tuple[T | None, str | None] | None] = [None] * world
    dist.gather_object(mine, gathered if dist.get_rank() == 0 else None, dst=0)
    parts: list[tuple[U | None, str | None]] = []
    if dist.get_rank() == 0:
        results = cast(list[tuple[T, str | None]], gathered)
        failed = next((text for _, text in results if text is not None), None)
        try:
            parts = [(part, None) for part in distribute([result for result, _ in results])] if not failed else []
        except Exception as error:
            failed = _describe(error)
        parts = [(None, failed)] * world if failed else parts
    box: list[tuple[U | None, str | None] | None] = [None]
    dist.scatter_object_list(box, parts if dist.get_rank() == 0 else None, src=0)
    part, failure = cast(tuple[U | None, str | None], box[0])
    if failure is not None:
        raise AgreedError(failure)
    return cast(U, part)


def _describe(error: Exception) -> str:
    return f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
