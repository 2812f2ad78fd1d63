"""Workers that are reused, and what happens when one fails."""

from __future__ import annotations

import os
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from hpjob.core.errors import UserInputError
from hpjob.runtime.process_pool import ProcessPool, WorkerError

pytestmark = pytest.mark.distributed


def sum_of_ranks() -> tuple[int, int]:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total), os.getpid()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise UserInputError("no such thing", hint="try another")
    dist.barrier()


def die_on(rank: int, *, lingering: bool) -> None:
    """End a process; ``lingering`` = its peers lose the connection to it, and say so, some time before it is gone."""
    if dist.get_rank() == rank:
        if lingering:
            dist.destroy_process_group()
            time.sleep(1)
        os._exit(7)
    dist.barrier()


def wait_on(rank: int) -> None:
    if dist.get_rank() == rank:
        threading.Event().wait()


def test_worlds_of_different_size_reuse_the_processes(pool: ProcessPool) -> None:
    three = pool.run(sum_of_ranks, world=3)
    two = pool.run(sum_of_ranks, world=2)
    assert [total for total, _ in three] == [3, 3, 3]
    assert [total for total, _ in two] == [1, 1]
    assert [pid for _, pid in two] == [pid for _, pid in three[:2]]


def test_a_failure_names_its_rank_and_the_next_job_runs() -> None:
    with ProcessPool(2) as own:
        with pytest.raises(WorkerError, match="no such thing") as caught:
            own.run(fail_on, 1, world=2)
        assert caught.value.rank == 1
        assert caught.value.refusal == "no such thing"
        assert [total for total, _ in own.run(sum_of_ranks, world=2)] == [1, 1]


@pytest.mark.parametrize("lingering", [False, True])
def test_a_dead_worker_is_reported_and_not_the_one_that_lost_it(lingering: bool) -> None:
    with ProcessPool(2) as own, pytest.raises(WorkerError, match="ended with code 7") as caught:
        own.run(partial(die_on, 1, lingering=lingering), world=2)
    assert caught.value.rank == 1


def test_a_worker_that_died_between_two_jobs_is_reported_and_replaced() -> None:
    with ProcessPool(2) as own:
        own.run(sum_of_ranks, world=2)
        own._workers[1].process.kill()
        own._workers[1].process.join()
        with pytest.raises(WorkerError, match=r"with code -9"):
            own.run(sum_of_ranks, world=2)
        assert [total for total, _ in own.run(sum_of_ranks, world=2)] == [1, 1]


def test_a_job_may_have_less_time_than_the_pool() -> None:
    with ProcessPool(2, timeout_s=600) as own, pytest.raises(WorkerError):
        own.run(wait_on, 1, world=2, timeout_s=3.0)


def test_a_world_larger_than_the_pool_is_refused(pool: ProcessPool) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        pool.run(sum_of_ranks, world=9)


def test_workers_with_a_gpu_each_are_not_forked() -> None:
    """An import may have started CUDA (torchao's does), which a forked process cannot use."""
    assert ProcessPool(1, backend="nccl").context().get_start_method() == "spawn"
    assert ProcessPool(1, backend="gloo").context().get_start_method() == "forkserver"
