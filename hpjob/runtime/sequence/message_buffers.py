"""Memory of messages: buffers that are used again and again, and memory that NCCL cannot hold back.

torch's NCCL group records its own stream on the tensors of every send and receive (collectives keep references until
``wait`` instead). The allocator gives recorded memory out again only when the *host* sees that the device is past the
message, and a host that runs ahead of the device never sees it: each message then gets fresh memory.
Neither is needed here. A message is ordered behind the current stream when it is queued, and ``wait`` orders the
current stream behind it, so what is queued after that may write to the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

_MOST_IDLE = 32
"""Idle buffers that are kept. Sizes that are asked for no longer fall out."""
_Key = tuple[tuple[int, ...], torch.dtype, torch.device, int]


class MessageBuffers:
    """Tensors that are handed out, given back, and handed out again in the order of the current stream.

    Attributes:
        num_made: How many were ever allocated.
    """

    def __init__(self) -> None:
        self.num_made = 0
        self._idle: list[tuple[_Key, Tensor]] = []
        self._in_use: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    @property
    def num_in_use(self) -> int:
        """How many are handed out."""
        return len(self._in_use)

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous buffer that nobody else has, with any contents."""
        key = _key(shape, dtype, device)
        place = next((place for place, (other, _) in enumerate(self._idle) if other == key), None)
        if place is None:
            self.num_made += 1
            # One made in inference mode could not be written to outside.
            with torch.inference_mode(False):
                tensor = torch.empty(key[0], dtype=dtype, device=device)
        else:
            _, tensor = self._idle.pop(place)
        self._in_use[id(tensor)] = tensor
        return tensor

    def owns(self, tensor: Tensor) -> bool:
        """Whether this very tensor, not a view of it, was handed out and not given back."""
        return self._in_use.get(id(tensor)) is tensor

    def give_back(self, *tensors: Tensor) -> None:
        """Everything that uses them is queued and every message with them was waited for; others are left alone."""
        for tensor in tensors:
            if self.owns(tensor):
                del self._in_use[id(tensor)]
                self._idle.append((_key(tensor.shape, tensor.dtype, tensor.device), tensor))
        del self._idle[:-_MOST_IDLE]


def _key(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> _Key:
    """Of another stream nothing is known: it has buffers of its own."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return tuple(shape), dtype, device, stream


def unrecorded(tensor: Tensor) -> Tensor:
    """The same memory as a tensor on which ``record_stream`` does nothing, to be given to a message.

    The allocator records streams only on memory whose owner it is, and the owner of this tensor's memory is the given
    tensor. Whoever sends or receives it keeps it until ``wait``.
    """
    if not tensor.is_cuda:
        return tensor
    alias: Tensor = from_dlpack(torch.to_dlpack(tensor.detach()))  # type: ignore[attr-defined]
    return alias
