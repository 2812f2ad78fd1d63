"""Gloo worker processes that are started once and run many test functions.

Importing torch costs seconds, so a fork server imports it once and the workers are its forks.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

MAX_WORLD = 4
TIME_LIMIT_S = 300
PRELOADED = (
    "torch",
    "torch.distributed",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)


class WorkerError(AssertionError):
    """A test function failed on a rank; the message holds that rank's traceback."""


def _serve(rank: int, store_file: str, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(store_file, MAX_WORLD)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=MAX_WORLD, timeout=timedelta(seconds=TIME_LIMIT_S)
    )
    groups = {world: dist.new_group(list(range(world))) for world in range(1, MAX_WORLD + 1)}
    while True:
        task = connection.recv()
        if task is None:
            break
        function, world, args = task
        try:
            torch.manual_seed(0)
            connection.send((True, function(groups[world], *args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class GlooPool:
    """``MAX_WORLD`` ranks waiting for functions to run."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(MAX_WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, str(Path(self._folder.name) / "store"), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        """Call ``function(process group, *args)`` on ``world`` ranks; the results, rank 0 first.

        ``function`` is a module-level function; arguments and results are pickled (numpy arrays, not tensors).

        Raises:
            WorkerError: A rank raised or did not answer in time; the pool is then closed.
        """
        for connection in self._connections[:world]:
            connection.send((function, world, args))
        waiting: list[Any] = list(self._connections[:world])
        results: dict[Any, Any] = {}
        while waiting:
            ready = wait(waiting, timeout=TIME_LIMIT_S)
            if not ready:
                self._fail("no answer in time")
            for connection in ready:
                waiting.remove(connection)
                try:
                    succeeded, result = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    succeeded, result = False, "the worker process ended"
                if not succeeded:
                    self._fail(f"rank {self._connections.index(connection)}: {result}")  # type: ignore[arg-type]
                results[connection] = result
        return [results[connection] for connection in self._connections[:world]]

    def _fail(self, message: str) -> None:
        self.close()
        shared_pool.cache_clear()
        raise WorkerError(message)

    def close(self) -> None:
        """End the workers; those that hang in a collective are killed."""
        for connection in self._connections:
            try:
                connection.send(None)
            except OSError:
                continue
        for process in self._processes:
            process.join(timeout=0.5)
            if process.is_alive():
                process.kill()
                process.join()
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()


@functools.cache
def shared_pool() -> GlooPool:
    """The one pool of this test process."""
    pool = GlooPool()
    atexit.register(pool.close)
    return pool
