"""Bytes that tensors hold: of one kind, and the most at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GIB = 1 << 30


def held_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of the memory behind tensors, each piece once."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = _storage(tensor)
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


class Peak:
    """The most memory that was held at once while it was watched."""

    bytes: int = 0
    reserved_bytes: int | None = None


@contextmanager
def watched_peak(device: torch.device, held_before: int) -> Iterator[Peak]:
    """Watch what is done inside.

    A GPU's allocator counts by itself. On a CPU every tensor that an operation makes is counted until it is freed;
    that does not see what a kernel takes for itself.

    Args:
        device: Where the work runs.
        held_before: Bytes of tensors that exist already and stay, for a CPU.
    """
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device)
        peak.reserved_bytes = torch.cuda.max_memory_reserved(device)
        return
    counter = _LiveBytes(held_before)
    with counter:
        yield peak
    peak.bytes = counter.peak


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that operations make, until they are freed or shrunk."""

    def __init__(self, start: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = start
        self._known: dict[int, int] = {}

    def __enter__(self) -> Any:
        self._patch = patch.object(torch.UntypedStorage, "resize_", self._resizing(torch.UntypedStorage.resize_))
        self._patch.start()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_storage(leaf)._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _storage(leaf)._cdata not in given:
                self._add(_storage(leaf))
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            self._known[storage._cdata] = 0
            self._set(storage._cdata, storage.nbytes())
            weakref.finalize(storage, self._forget, storage._cdata)

    def _set(self, key: int, size: int) -> None:
        self.live += size - self._known[key]
        self._known[key] = size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)

    def _resizing(self, resize: Any) -> Any:
        """Weights that are whole only while they are used are freed and filled by the size of their storage."""

        def wrapper(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._known:
                self._set(storage._cdata, size)
            return result

        return wrapper


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.untyped_storage()
