"""What the ranks tell each other while a save runs in the background: notes in the store, no collectives.

Collectives belong to the main thread, which trains meanwhile.
"""

from __future__ import annotations

import pickle
import time
from datetime import timedelta
from typing import Any, Protocol

from torch._C._distributed_c10d import TCPStore

from hpjob.core.run_dir import AttemptDir
from hpjob.core.run_records import read_json

_STORE_TIMEOUT = timedelta(seconds=60)
_FIRST_POLL_S, _LONGEST_POLL_S = 0.005, 0.25


class Store(Protocol):
    """The part of torch's stores that is used."""

    def set(self, key: str, value: Any, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


def connect(attempt: AttemptDir) -> Store:
    """Open a connection to the store of an attempt, for saves alone: another thread's may be blocked in a wait."""
    where = read_json(attempt.rendezvous) or {}
    return TCPStore(str(where["host"]), int(where["port"]), None, False, _STORE_TIMEOUT)


class SaveNotes:
    """Notes of one save.

    Args:
        store: A connection that no other thread uses.
        number: Of the save in this attempt, the same on all ranks.
        deadline_s: Seconds from now after which waiting fails.
    """

    def __init__(self, store: Store, number: int, deadline_s: float) -> None:
        self._store = store
        self._prefix = f"hpjob/save/{number}"
        self._deadline = time.monotonic() + deadline_s

    def put(self, name: str, value: object, *, rank: int | None = None) -> None:
        """Leave a note."""
        self._store.set(self._key(name, rank), pickle.dumps(value))

    def take(self, name: str, *, rank: int) -> Any:
        """Wait for a rank's note and remove it.

        Raises:
            TimeoutError: It did not come.
            RuntimeError: The store went away.
        """
        key = self._key(name, rank)
        value = self._wait(key)
        self._store.delete_key(key)
        return value

    def read(self, name: str) -> Any:
        """Wait for a note that all ranks read. Raises as :meth:`take`."""
        return self._wait(self._key(name, None))

    def remove(self, name: str) -> None:
        """Remove a note that all ranks have read."""
        self._store.delete_key(self._key(name, None))

    def _wait(self, key: str) -> Any:
        pause_s = _FIRST_POLL_S
        while not self._store.check([key]):
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"no answer in time ({key})")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        return pickle.loads(self._store.get(key))

    def _key(self, name: str, rank: int | None) -> str:
        return f"{self._prefix}/{name}" + ("" if rank is None else f"/{rank}")
