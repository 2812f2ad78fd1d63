"""Point-to-point messages between pipeline ranks.

With NCCL a pipeline has one process group a direction and kind of tensor. Between two ranks a group then
carries messages one way only, and NCCL, which runs a group's operations in the order they were given and
knows no tags, cannot have a send and a receive wait for each other. With gloo one group carries them all;
the kind is the tag.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from hpjob.plan.model import Axis
from hpjob.runtime.mesh import Mesh
from hpjob.runtime.pipeline.schedule import Action, Channel, Kind, Message, Schedule, channels, message_of


class Transport:
    """Sends results to and receives inputs from other pipeline ranks.

    Args:
        schedule: Names all messages.
        mesh: Its pp axis is used.
        shape: Of every tensor that travels: hidden states between two layers.
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
        self._groups = _direction_groups(schedule, mesh)
        self._unposted: dict[Channel, Iterator[Message]] = {}
        self._incoming: dict[Action, tuple[Tensor, dist.Work]] = {}
        self._outgoing: list[tuple[Tensor, dist.Work]] = []
        self._connect()

    def begin_step(self, schedule: Schedule | None = None) -> None:
        """Forget the last step's messages.

        Args:
            schedule: Over the same stages, for this step only; None = that of the constructor.
        """
        messages = self._channels if schedule is None else channels(schedule, self._rank)
        self._unposted = {channel: iter(queue) for channel, queue in messages.items() if channel[1] == self._rank}

    def expect(self, action: Action) -> None:
        """Post the receive of an action's result, so that it can arrive while other work runs."""
        message = message_of(self._schedule, action)
        if message is None or action in self._incoming:
            return
        channel = (message.source, message.destination, action.kind)
        for earlier in self._unposted[channel]:
            buffer = self.buffer()
            group = self._groups[_direction(channel)]
            work = dist.irecv(buffer, self._ranks[message.source], group=group, tag=_tag(action.kind))
            self._incoming[earlier.made_by] = (buffer, _present(work))
            if earlier.made_by == action:
                return

    def buffer(self) -> Tensor:
        """Return memory for one message."""
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)

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
        group = self._groups[_direction((message.source, message.destination, action.kind))]
        tensor = tensor.contiguous()
        work = _present(dist.isend(tensor, self._ranks[message.destination], group=group, tag=_tag(action.kind)))
        self._outgoing = [(kept, pending) for kept, pending in self._outgoing if not pending.is_completed()]
        self._outgoing.append((tensor, work))

    def _connect(self) -> None:
        """Send one element over every channel, in one order on all ranks.

        NCCL makes the communicator of a pair with its first message and blocks both hosts until then;
        within a step, where receives are posted ahead, that could be for ever.
        """
        device, ranks = self._device, self._ranks
        for source, destination, kind in sorted(self._channels):
            group = self._groups[_direction((source, destination, kind))]
            element = torch.zeros(1, device=device)
            if source == self._rank:
                dist.send(element, ranks[destination], group=group, tag=_tag(kind))
            else:
                dist.recv(element, ranks[source], group=group, tag=_tag(kind))

    def end_step(self) -> None:
        """Wait until everything sent has left."""
        for _, work in self._outgoing:
            work.wait()
        self._outgoing.clear()


Direction = tuple[bool, Kind]
"""Whether messages go to a higher pipeline rank, and what they carry."""


def _direction(channel: Channel) -> Direction:
    source, destination, kind = channel
    return destination > source, kind


def _direction_groups(schedule: Schedule, mesh: Mesh) -> dict[Direction, dist.ProcessGroup]:
    pp_size = mesh.size(Axis.PP)
    directions = sorted({_direction(channel) for rank in range(pp_size) for channel in channels(schedule, rank)})
    return dict(zip(directions, mesh.message_groups(Axis.PP, len(directions)), strict=True))


def _tag(kind: Kind) -> int:
    return list(Kind).index(kind)


def _present(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this rank is not part of the group of its own channel")
    return work
