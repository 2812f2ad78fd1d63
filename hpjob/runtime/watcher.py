"""A thread that ends this rank when another one failed, even if the main thread hangs in a collective."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from hpjob.core.run_records import read_failures, read_outcome
from hpjob.runtime.failures import FailureReporter

log = logging.getLogger(__name__)

Probe = Callable[[], str | None]
"""Returns why this rank should end, or None."""
_INTERVAL_S = 1.0
_MANY_RANKS = 64
_GRACE_S = 4.0


class PeerWatcher:
    """Polls probes about once a second; the first is the attempt folder, the store joins later.

    After a probe tells of a failure the main thread gets a few seconds to raise an error of its
    own, which says more than that a peer is gone.

    Attributes:
        on_stop: Called when polling stops because this rank leaves in good order.
        interval_s: Between two rounds of polling.
    """

    def __init__(self, reporter: FailureReporter) -> None:
        self.on_stop: Callable[[], None] | None = None
        self._reporter = reporter
        self._probes: list[Probe] = [self._probe_files]
        self._stopped = threading.Event()
        # Listing a folder from thousands of ranks each second would load a shared file system.
        self.interval_s = _INTERVAL_S * max(1.0, min(5.0, reporter.rank.world_size / _MANY_RANKS))
        self._thread = threading.Thread(target=self._watch, name="peer-watcher", daemon=True)

    def start(self) -> None:
        """Begin to poll."""
        self._thread.start()

    def add(self, probe: Probe) -> None:
        """Ask one more source."""
        self._probes.append(probe)

    def stop(self) -> None:
        """Stop polling; from now on ranks may leave in any order."""
        self._stopped.set()
        if self.on_stop is not None:
            self.on_stop()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(self.interval_s):
            for probe in tuple(self._probes):
                why = probe()
                if why is None:
                    continue
                # Rank 0 holds the store, in which the others have yet to read why they end.
                if not self._stopped.wait(_GRACE_S + (self.interval_s if self._reporter.rank.rank == 0 else 0.0)):
                    self._reporter.leave_for_peer(why)
                return

    def _probe_files(self) -> str | None:
        attempt = self._reporter.rank.attempt
        others = [failure for failure in read_failures(attempt) if failure.rank != self._reporter.rank.rank]
        if others:
            return f"rank {others[0].rank} on {others[0].node} failed: {others[0].exception}: {others[0].message}"
        outcome = read_outcome(attempt)
        return f"the attempt failed: {outcome.reason}" if outcome and outcome.kind == "failed" else None
