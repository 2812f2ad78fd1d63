"""Messages between neighbours of a ring: what each promises, and those that travel through the process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hpjob.runtime.sequence.message_buffers import MessageBuffers, unrecorded

Form = tuple[Sequence[int], torch.dtype]
"""Shape and dtype of a tensor that travels."""


def forms_of(tensors: Sequence[Tensor]) -> list[Form]:
    """Return what would describe these tensors to their receiver."""
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


class Message(Protocol):
    """Tensors on their way to the next rank while others arrive from the previous rank."""

    def wait(self) -> tuple[Tensor, ...]:
        """What arrived. On a GPU only the current stream waits, not the host."""


class GroupMessage:
    """Sends and receives of a process group, between any ranks.

    Args:
        buffers: Where arriving tensors are put; who waits for them gives them back.
        tensors: What is sent.
        arriving: Forms of what arrives.
        group: Carries both.
        following: Rank in ``group`` that is sent to.
        previous: Rank in ``group`` that is received from.
    """

    def __init__(
        self,
        buffers: MessageBuffers,
        tensors: Sequence[Tensor],
        arriving: Sequence[Form],
        group: dist.ProcessGroup,
        following: int,
        previous: int,
    ) -> None:
        self._sent = [tensor.contiguous() for tensor in tensors]
        device = tensors[0].device
        self._received = tuple(buffers.take(shape, dtype, device) for shape, dtype in arriving)
        to, of = dist.get_global_rank(group, following), dist.get_global_rank(group, previous)
        # Tags keep tensors of one shape apart where a backend does not promise their order.
        operations = [
            dist.P2POp(dist.isend, unrecorded(tensor), to, group, tag) for tag, tensor in enumerate(self._sent)
        ]
        operations += [
            dist.P2POp(dist.irecv, unrecorded(tensor), of, group, tag) for tag, tensor in enumerate(self._received)
        ]
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> tuple[Tensor, ...]:
        """See :class:`Message`."""
        for work in self._works:
            work.wait()
        self._works, self._sent = [], []
        return self._received
