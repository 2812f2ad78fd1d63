"""A process group of any size with one real member.

torch's fake group answers every collective at once: a gather repeats this rank's part, a reduction adds nothing,
messages carry nothing. Two kinds of traffic would then leave memory as it was found, which is often not a number;
here they carry what this rank sends itself, so that kernels see values of a usual size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a world that has no others.

    Args:
        rank: To be.
        world_size: Any.
    """
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with (
            patch.object(dist, "all_to_all_single", _all_to_all),
            patch.object(dist, "batch_isend_irecv", _exchange),
            patch.object(functional, "all_to_all_single", _functional_all_to_all),
        ):
            yield
    finally:
        dist.destroy_process_group()


def _all_to_all(output: Tensor, input: Tensor, *_: Any, group: Any = None, async_op: bool = False) -> None:
    """Receive from every peer as much as is sent to it."""
    output.copy_(input)


def _functional_all_to_all(tensor: Tensor, *_: Any) -> Tensor:
    """The same in compiled code."""
    return tensor.clone()


def _exchange(operations: Sequence[Any]) -> list[Any]:
    """Receive from a peer what is sent to another, and zeros where it would send more."""
    sent = [operation.tensor for operation in operations if operation.op is dist.isend]
    received = [operation.tensor for operation in operations if operation.op is not dist.isend]
    for number, target in enumerate(received):
        if number < len(sent):
            target.copy_(sent[number])
        else:
            target.zero_()
    return []
