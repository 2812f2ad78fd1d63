"""Four gloo ranks that are started once for all tests of folders and of the programming interface."""

from __future__ import annotations

import atexit
import functools

from hpjob.runtime.process_pool import ProcessPool


@functools.cache
def shared_rank_pool() -> ProcessPool:
    """Return the pool of this test process."""
    pool = ProcessPool(4)
    atexit.register(pool.close)
    return pool
