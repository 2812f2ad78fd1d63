"""Worker processes on this host that form process groups; started once and reused.

Importing torch and transformers costs seconds, so one server process imports them and workers without a GPU are
forked from it. A job is a function that runs on the first ``world`` workers inside a fresh process
group. When a worker fails, its peers may wait in a collective for ever: all workers are then ended and
new ones start with the next job.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.tensor import debug

from hpjob.core.errors import HpjobError
from hpjob.runtime.failures import classify

_PRELOAD = ["hpjob.runtime.engine", "hpjob.runtime.parity.worker"]
_CAUSE_S = 10.0
"""How long an error that only says that another worker went away waits for that one's."""
_SETTINGS = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}


class WorkerError(RuntimeError):
    """A job failed.

    Args:
        rank: The first worker that failed.
        trace: Its traceback, or what happened to the process.
        refusal: What an :class:`HpjobError` said, if it was one.
    """

    def __init__(self, rank: int, trace: str, refusal: str | None = None) -> None:
        super().__init__(f"rank {rank}: {trace}")
        self.rank = rank
        self.refusal = refusal


@dataclass(slots=True)
class _Worker:
    process: Any
    connection: Connection


@dataclass(frozen=True, slots=True)
class _Failed:
    rank: int
    trace: str
    refusal: str | None
    lost_a_peer: bool
    """Whether the error only says that another worker went away."""


class ProcessPool:
    """Up to ``size`` ranks on this host.

    Args:
        size: Largest world of a job.
        backend: ``gloo`` or ``nccl``; with nccl, rank r uses GPU r.
        timeout_s: Of a collective and of a whole job.
    """

    def __init__(self, size: int, *, backend: str = "gloo", timeout_s: float = 300.0) -> None:
        self.size = size
        self._backend = backend
        self._timeout_s = timeout_s
        self._workers: list[_Worker] = []
        self._jobs = 0
        self._store: TCPStore | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, world: int, timeout_s: float | None = None) -> list[Any]:
        """Run ``function(*args)`` on ranks 0 to ``world - 1`` and return their results in rank order.

        Args:
            function: Importable by name; it finds an initialised default process group.
            args: Picklable, the same for all ranks.
            world: At most the size of the pool.
            timeout_s: In place of the pool's own.

        Raises:
            WorkerError: A rank raised, died or took too long.
        """
        if not 1 <= world <= self.size:
            raise ValueError(f"a job of {world} ranks does not fit a pool of {self.size}")
        self._start()
        assert self._store is not None
        self._jobs += 1
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        job = (self._store.port, self._jobs, self._backend, world, limit_s)
        call = pickle.dumps((function, args))
        for rank in range(world):
            self._send(rank, (rank, job, call))
        return self._collect(world, limit_s)

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
            worker.process.join()
        self._workers.clear()
        self._store = None

    def _start(self) -> None:
        if self._workers:
            return
        saved = {name: os.environ.get(name) for name in _SETTINGS}
        os.environ.update(_SETTINGS)
        try:
            context = self.context()
            for _ in range(self.size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                self._workers.append(_Worker(process, ours))
        finally:
            for name, value in saved.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def context(self) -> Any:
        """How workers start: those with a GPU from nothing, since an import may have touched one (torchao does)."""
        if self._backend == "nccl":
            return multiprocessing.get_context("spawn")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        return context

    def _send(self, rank: int, job: tuple[Any, ...]) -> None:
        try:
            self._workers[rank].connection.send(job)
        except OSError:
            code = self._exit_code(rank)
            self.close()
            raise WorkerError(rank, f"the process ended between two jobs with code {code}") from None

    def _exit_code(self, rank: int) -> int | None:
        process = self._workers[rank].process
        process.join()
        code: int | None = process.exitcode
        return code

    def _collect(self, world: int, limit_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        open_ranks = {self._workers[rank].connection: rank for rank in range(world)}
        while open_ranks:
            ready = wait(list(open_ranks), timeout=limit_s)
            if not ready:
                self.close()
                raise WorkerError(min(open_ranks.values()), f"no answer within {limit_s:.0f} s")
            for connection in ready:
                rank = open_ranks.pop(connection)  # type: ignore[call-overload]
                ok, payload = self._answer(connection, rank)  # type: ignore[arg-type]
                if not ok:
                    failed = self._cause(_Failed(rank, *payload), open_ranks)
                    self.close()
                    raise WorkerError(failed.rank, failed.trace, failed.refusal)
                results[rank] = payload
        return [results[rank] for rank in range(world)]

    def _cause(self, failed: _Failed, open_ranks: dict[Connection, int]) -> _Failed:
        """Return the failure that this one follows from: a worker's peers may answer before its own end shows."""
        while failed.lost_a_peer and open_ranks:
            ready = wait(list(open_ranks), timeout=_CAUSE_S)
            if not ready:
                break
            for connection in ready:
                rank = open_ranks.pop(connection)  # type: ignore[call-overload]
                ok, payload = self._answer(connection, rank)  # type: ignore[arg-type]
                if not ok and failed.lost_a_peer:
                    failed = _Failed(rank, *payload)
        return failed

    def _answer(self, connection: Connection, rank: int) -> tuple[bool, Any]:
        try:
            return pickle.loads(connection.recv_bytes())  # type: ignore[no-any-return]
        except (EOFError, OSError):
            return False, (f"the process ended with code {self._exit_code(rank)}", None, False)


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            rank, job, call = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            answer = (True, _run(rank, job, call))
        except Exception as error:
            refusal = error.message if isinstance(error, HpjobError) else None
            answer = (False, (traceback.format_exc(), refusal, classify(error) == "peer-lost"))
        connection.send_bytes(pickle.dumps(answer))


def _run(rank: int, job: tuple[int, int, str, int, float], call: bytes) -> Any:
    port, number, backend, world, timeout_s = job
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, store=PrefixStore(f"job-{number}", store), rank=rank, world_size=world, timeout=timeout
    )
    function, args = pickle.loads(call)
    # Shows where a rank hangs, before the job is given up and the process killed.
    faulthandler.dump_traceback_later(0.9 * timeout_s)
    try:
        result = function(*args)
    finally:
        faulthandler.cancel_dump_traceback_later()
    # Groups that a reference cycle keeps (FSDP2 makes some), or a cache, would keep their threads, which wake often.
    _forget_device_meshes()
    gc.collect()
    # Only after success: on a failure peers may be stuck, and tearing down would wait for them.
    dist.barrier()
    dist.destroy_process_group()
    return result


def _forget_device_meshes() -> None:
    """Empty torch's caches of DTensor operations, which hold meshes and with them groups."""
    for name in ("_clear_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
        clear = getattr(debug, name, None)
        if clear is not None:
            clear()
