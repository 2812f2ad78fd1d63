"""Point-to-point messages between pipeline ranks.

Each pair of ranks has one process group a direction and kind of tensor. A group then carries messages
one way only, and NCCL, which runs a group's operations in the order they were given and knows no
tags, cannot have a send and a receive wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpjob.plan.model import Axis
from hpjob.runtime.mesh import Mesh
from hpjob.runtime.pipeline.schedule import Action, Channel, Message, Schedule, channels, message_of


class Transport:
    """Sends results to and receives inputs from other pipeline ranks.

    Args:
        schedule: Names all messages.
        mesh: Its pp axis is used.
        shape: Of every tensor that travels: (microbatch, seq, hidden).
        dtype: Of every tensor that travels.
        device: Where tensors are received.
    """

    def __init__(
        self, schedule: Schedule, mesh: Mesh, *, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._schedule = schedule
        self._rank = mesh.coordinate(Axis.PP)
        self._ranks = mesh.ranks(Axis.PP)
        self._shape, self._dtype, self._device = shape, dtype, device
        self._channels = channels(schedule, self._rank)
        self._groups = dict(_channel_groups(schedule, self._ranks, _group_options(device)))
        if device.type == "cuda":
            self._connect()
        self._unposted: dict[Channel, Iterator[Message]] = {}
        self._incoming: dict[Action, tuple[Tensor, dist.Work]] = {}
        self._outgoing: list[tuple[Tensor, dist.Work]] = []

    def _connect(self) -> None:
        """Open every channel's connection now, in an order that all ranks share.

        NCCL opens one with its first message and then waits for both ranks and for the GPU, which may be busy
        with a receive that this very rank has still to answer.
        """
        token = torch.zeros(1, device=self._device)
        for channel, group in sorted(self._groups.items()):
            source, destination, _ = channel
            if source == self._rank:
                dist.send(token, self._ranks[destination], group=group)
            else:
                dist.recv(token, self._ranks[source], group=group)
        torch.cuda.synchronize(self._device)

    def begin_step(self) -> None:
        """Forget the last step's messages."""
        self._unposted = {
            channel: iter(messages) for channel, messages in self._channels.items() if channel[1] == self._rank
        }

    def expect(self, action: Action) -> None:
        """Post the receive of an action's result, so that it can arrive while other work runs."""
        message = message_of(self._schedule, action)
        if message is None or action in self._incoming:
            return
        channel = (message.source, message.destination, action.kind)
        for earlier in self._unposted[channel]:
            buffer = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            work = dist.irecv(buffer, self._ranks[message.source], group=self._groups[channel])
            self._incoming[earlier.made_by] = (buffer, _present(work))
            if earlier.made_by == action:
                return

    def receive(self, action: Action) -> Tensor:
        """Return an action's result made on another rank; waits for it."""
        self.expect(action)
        buffer, work = self._incoming.pop(action)
        work.wait()
        return buffer

    def send(self, action: Action, tensor: Tensor) -> None:
        """Start sending an action's result to the rank that needs it."""
        message = message_of(self._schedule, action)
        if message is None:
            raise ValueError(f"the result of {action} stays on its rank")
        group = self._groups[message.source, message.destination, action.kind]
        tensor = tensor.contiguous()
        work = _present(dist.isend(tensor, self._ranks[message.destination], group=group))
        self._outgoing = [(kept, pending) for kept, pending in self._outgoing if not pending.is_completed()]
        self._outgoing.append((tensor, work))

    def end_step(self) -> None:
        """Wait until everything sent has left."""
        for _, work in self._outgoing:
            work.wait()
        self._outgoing.clear()


def _channel_groups(
    schedule: Schedule, ranks: list[int], options: dict[str, Any]
) -> Iterator[tuple[Channel, dist.ProcessGroup]]:
    """Make one two-rank group a channel, in the same order on every rank of the pipeline."""
    names = {channel for rank in range(len(ranks)) for channel in channels(schedule, rank)}
    mine = dist.get_rank()
    for source, destination, kind in sorted(names):
        members = [ranks[source], ranks[destination]]
        if mine in members:
            group = dist.new_group(sorted(members), use_local_synchronization=True, **options)
            yield (source, destination, kind), group


def _group_options(device: torch.device) -> dict[str, Any]:
    """Let a waiting receive occupy four multiprocessors of a GPU, not thirty."""
    if device.type != "cuda":
        return {}
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = 4
    return {"backend": "nccl", "pg_options": options}


def _present(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this rank is not part of the group of its own channel")
    return work
