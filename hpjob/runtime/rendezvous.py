"""How the ranks find each other: a store that rank 0 opens on a free port and publishes in a file.

The attempt folder is new for every start, so its ``rendezvous.json`` is never an old one.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from hpjob.core.run_records import read_json, write_text_atomically
from hpjob.plan.model import Plan
from hpjob.plan.placement_line import device_index
from hpjob.runtime.failures import PeerLostError
from hpjob.runtime.rank import Rank
from hpjob.runtime.timeouts import Timeouts

log = logging.getLogger(__name__)
_POLL_S = 0.1
_STORE_TIMEOUT = timedelta(seconds=10)
_FAILED_KEY = "hpjob/failed"
_SILENCE_S = 15.0
_SILENT_LOOKS = 8
_GONE = 1 << 40
"""Added to a rank's count when it leaves in good order."""


class PeerStore:
    """A connection of its own to rank 0's store, to tell and learn of failures.

    The main thread's connection may be blocked in a wait of any length; this one never is. A rank that is
    killed tells nothing, and NCCL does not notice: the others' GPUs go on waiting. So every rank counts up a
    number in the store; rank 0 looks whether all of them still do, and all look at rank 0, whose store may answer
    while the rest of it stands still.

    Attributes:
        on_silent: Called with a rank that stopped counting and since when; returns what to tell the others.
    """

    def __init__(self, host: str, port: int, *, rank: int, world_size: int) -> None:
        self.on_silent: Callable[[int, float], str] | None = None
        self._store = TCPStore(host, port, None, False, _STORE_TIMEOUT)
        self._rank = rank
        watched = range(1, world_size) if rank == 0 else (0,)
        self._beats = {other: _Beats() for other in watched}

    def tell_failure(self, message: str) -> None:
        """Say that this rank failed; the first message stays."""
        try:
            self._store.compare_set(_FAILED_KEY, "", message)
        except RuntimeError:
            return  # rank 0 is gone, which tells the others enough

    def failure(self) -> str | None:
        """Return what the rank that failed first told the others, or None."""
        return self.read(_FAILED_KEY)

    def probe(self) -> str | None:
        """Return why this rank should end, or None."""
        try:
            if self._store.check([_FAILED_KEY]):
                return str(self._store.get(_FAILED_KEY).decode())
            self._store.add(_alive_key(self._rank), 1)
            silent = next((rank for rank, beats in self._beats.items() if beats.ended(self._count(rank))), None)
        except RuntimeError:
            return "rank 0 went away: its store does not answer"
        if silent is None:
            return None
        if self.on_silent is not None:
            message = self.on_silent(silent, _SILENCE_S)
        else:
            message = (
                f"rank {silent} shows no sign of life since {_SILENCE_S:.0f} s: it was killed, or its host is gone"
            )
        self.tell_failure(message)
        return message

    def publish(self, state: str) -> None:
        """Say what this rank is doing."""
        self._store.set(_state_key(self._rank), state)

    def published(self, rank: int) -> str | None:
        """Return what a rank last said that it is doing."""
        return self.read(_state_key(rank))

    def say_once(self, key: str, text: str) -> None:
        """Write a value that stays what it is once it is there."""
        self._store.compare_set(key, "", text)

    def read(self, key: str) -> str | None:
        """Return a value, or None while nobody has written it."""
        return str(self._store.get(key).decode()) if self._store.check([key]) else None

    def leave(self) -> None:
        """Say that this rank ends in good order, so that nobody misses it."""
        try:
            self._store.add(_alive_key(self._rank), _GONE)
        except RuntimeError:
            return  # rank 0 has left already

    def _count(self, rank: int) -> int:
        return int(self._store.add(_alive_key(rank), 0))


@dataclass(slots=True)
class _Beats:
    """What one rank has seen of another rank's sign of life."""

    count: int = 0
    seen_at: float = 0.0
    looks: int = 0
    """Looks since the count last changed."""

    def ended(self, count: int) -> bool:
        """Tell whether a rank that began to count has stopped; time alone says little on a host that is overloaded."""
        now = time.monotonic()
        if count != self.count:
            self.count, self.seen_at, self.looks = count, now, 0
            return False
        self.looks += 1
        began = 0 < count < _GONE
        return began and self.looks >= _SILENT_LOOKS and now - self.seen_at > _SILENCE_S


def _state_key(rank: int) -> str:
    return f"hpjob/state/{rank}"


def _alive_key(rank: int) -> str:
    return f"hpjob/alive/{rank}"


def choose_device(rank: Rank, plan: Plan) -> torch.device:
    """Return the GPU that the plan gives this rank, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    index = device_index(plan, rank.rank, os.environ.get("CUDA_VISIBLE_DEVICES"), count)
    if index is None:
        index = rank.local_rank % count
        log.warning("the planned GPU is not among the %d visible ones; using device %d", count, index)
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def meet(rank: Rank, timeouts: Timeouts) -> TCPStore:
    """Open the store on rank 0, find it on the others.

    Raises:
        PeerLostError: Rank 0 did not publish its store in time.
    """
    stay_on_loopback(rank.master_addr, os.environ)
    timeout = timedelta(seconds=timeouts.setup_s)
    return _open_store(rank, timeout) if rank.rank == 0 else _find_store(rank, timeout)


def join(rank: Rank, device: torch.device, store: TCPStore, timeouts: Timeouts) -> None:
    """Create the default process group over all ranks.

    With GPUs the group has NCCL for their tensors and gloo for the small messages of the loop and
    the checkpoint, which then never wait for the GPU.

    Raises:
        RuntimeError: torch could not connect the ranks.
    """
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=timeouts.setup_s),
    )


def set_timeout(seconds: float) -> None:
    """Bound how long a collective of any group of this process may take from now on."""
    set_one = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    world = getattr(dist.distributed_c10d, "_world", None)
    if set_one is None or world is None:
        return  # a torch without this hook keeps the long time-out
    for group in list(world.pg_map):
        set_one(timedelta(seconds=seconds), group)


def _open_store(rank: Rank, timeout: timedelta) -> TCPStore:
    store = TCPStore(rank.master_addr, 0, None, True, timeout, wait_for_workers=False)
    document = json.dumps({"host": rank.master_addr, "port": store.port})
    write_text_atomically(rank.attempt.rendezvous, document + "\n")
    return store


def _find_store(rank: Rank, timeout: timedelta) -> TCPStore:
    deadline = time.monotonic() + timeout.total_seconds()
    while (document := read_json(rank.attempt.rendezvous)) is None:
        if time.monotonic() > deadline:
            raise PeerLostError(
                f"rank 0 did not open its store within {timeout.total_seconds():.0f} s",
                hint=f"look into {rank.attempt.rank_log(0)}; HPJOB_SETUP_TIMEOUT_S sets how long to wait",
            )
        time.sleep(_POLL_S)
    return TCPStore(str(document["host"]), int(document["port"]), None, False, timeout)


def stay_on_loopback(address: str, env: MutableMapping[str, str]) -> None:
    """Keep a run whose ranks all share one host off its network cards."""
    try:
        loopback = address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return
    if loopback:
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        env.setdefault("NCCL_SOCKET_IFNAME", "lo")
