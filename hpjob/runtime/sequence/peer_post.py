"""Messages around a ring by copies into the following rank's memory, which take no multiprocessors from attention.

A send or receive of NCCL is a kernel, which occupies multiprocessors while it waits and while it transfers. Copy
engines leave them alone. What arrives is used where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hpjob.runtime.parallel.peer_arena import bytes_for
from hpjob.runtime.parallel.peer_memory import PeerMemory, SideStream, allocator, reaches_peers
from hpjob.runtime.sequence.messages import Form, forms_of

_MOST_SLOTS = 2


class PeerPost:
    """Carries one kind of messages from each rank of a group to the following one; all ranks send at the same time.

    Two slots take turns. Whoever gets a message queues all that reads it, sending it on included, after waiting for it
    and before sending the next but one, all on one stream. The ranks meet before they copy, each behind what it had
    queued, so the slot is free when its turn comes. They meet again behind the copies, so what was waited for is whole.
    Two ranks have one message a pass, and all that reads it is queued before the next pass: one slot does.
    Messages of another kind, which are sent and waited for in between, have slots of their own.

    Args:
        group: Ranks that reach each other's memory, more than one.
        allocate: Makes memory of a size in bytes on all ranks; a collective call.
        device: This rank's.
        side: Where copies run; may be shared by kinds, as all ranks send in the same order.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        allocate: Callable[[int], PeerMemory],
        device: torch.device,
        side: SideStream,
    ) -> None:
        self._rank = group.rank()
        self._following = (self._rank + 1) % group.size()
        self._allocate = allocate
        self._device = device
        self._side = side
        self._num_slots = min(_MOST_SLOTS, group.size() - 1)
        self._memory: PeerMemory | None = None
        self._slot_bytes = 0
        self._turn = 0

    def send(self, tensors: Sequence[Tensor], arriving: Sequence[Form], room: Sequence[Form]) -> PeerMessage:
        """Start sending; a collective call.

        Args:
            tensors: To the following rank.
            arriving: Forms of what the previous rank sends.
            room: Forms of the most that any rank sends with this message, equal on all ranks; may grow only when all
                that reads earlier messages is queued.

        Raises:
            ValueError: More is sent than there is room for.
        """
        sent = [tensor if _lies_in_pieces(tensor) else tensor.contiguous() for tensor in tensors]
        if max(bytes_for(forms_of(sent)), bytes_for(arriving)) > bytes_for(room):
            raise ValueError("a message is larger than the room that all ranks keep for it")
        memory, begin = self._next_slot(bytes_for(room))
        places = _views(memory, self._following, forms_of(sent), begin)
        with self._side.following():
            memory.meet()
            for place, tensor in zip(places, sent, strict=True):
                _copy(place, tensor)
            memory.meet()
            arrival = self._side.mark()
        return PeerMessage(sent, _views(memory, self._rank, arriving, begin), self._side, arrival)

    def _next_slot(self, num_bytes: int) -> tuple[PeerMemory, int]:
        if self._memory is None or num_bytes > self._slot_bytes:
            if self._device.type == "cuda":
                if self._memory is not None:
                    # Nobody may read any more what is given back here.
                    torch.cuda.synchronize(self._device)
                self._memory = None
                # What torch's allocator keeps for itself is no memory for peers.
                torch.cuda.empty_cache()
            self._slot_bytes = num_bytes
            # Memory made in inference mode could not be written to outside.
            with torch.inference_mode(False):
                self._memory = self._allocate(self._num_slots * num_bytes)
        self._turn = (self._turn + 1) % self._num_slots
        return self._memory, self._turn * self._slot_bytes


class PeerMessage:
    """A message on its way; see :class:`PeerPost`.

    Args:
        sent: Kept until it was copied.
        received: Where the previous rank's tensors arrive.
        side: Where copies run.
        arrival: After it all of this message has arrived.
    """

    def __init__(
        self, sent: list[Tensor], received: tuple[Tensor, ...], side: SideStream, arrival: torch.cuda.Event | None
    ) -> None:
        self._sent = sent
        self._received = received
        self._side = side
        self._arrival = arrival

    def wait(self) -> tuple[Tensor, ...]:
        """What arrived, to be read in its slot, and not written."""
        self._side.join(self._arrival)
        self._sent = []
        return self._received


def _lies_in_pieces(tensor: Tensor) -> bool:
    """Whether each sequence of a batch is contiguous, as part of the rows is."""
    return tensor[:1].is_contiguous()


def _copy(place: Tensor, tensor: Tensor) -> None:
    """Copy piece by piece what does not lie together, for a copy with gaps is a kernel."""
    if tensor.is_contiguous():
        place.copy_(tensor)
        return
    for to, piece in zip(place, tensor, strict=True):
        to.copy_(piece)


def _views(memory: PeerMemory, rank: int, forms: Sequence[Form], begin: int) -> tuple[Tensor, ...]:
    """Tensors of these forms one after the other."""
    return tuple(
        memory.of(rank, shape, dtype, begin + bytes_for(forms[:number])) for number, (shape, dtype) in enumerate(forms)
    )


def peer_posts(group: dist.ProcessGroup, device: torch.device, count: int) -> list[PeerPost] | None:
    """Return posts for kinds of messages; a collective call of the group.

    Args:
        group: Any ranks.
        device: This rank's.
        count: How many kinds.

    Returns:
        None where the ranks do not reach each other's memory.
    """
    if group.size() == 1 or not reaches_peers(group, device):
        return None
    side = SideStream(device)
    return [PeerPost(group, allocator(group, device), device, side) for _ in range(count)]
