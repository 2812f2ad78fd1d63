"""Threads that end this rank when another one failed, even if the main thread hangs in a collective."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from hpjob.core.run_records import read_failures, read_outcome
from hpjob.runtime.failures import FailureReporter
from hpjob.runtime.health.progress import Stillness

log = logging.getLogger(__name__)

Probe = Callable[[], str | None]
"""Returns why this rank should end, or None."""
_INTERVAL_S = 1.0
_MANY_RANKS = 64
_GRACE_S = 4.0
_STORE_SILENCE_S = 15.0
_JOIN_S = 5.0


class PeerWatcher:
    """Polls the attempt folder and, once it is there, the store, about once a second.

    After a probe tells of a failure the main thread gets a few seconds to raise an error of its
    own, which says more than that a peer is gone. Folder and store have a thread each: a file system that stalls must
    not make this rank look dead. A third thread notices when the store answers no more, since a question to a process
    that is stopped waits for ever.

    Attributes:
        on_stop: Called when polling stops because this rank leaves in good order.
        interval_s: Between two rounds of polling.
    """

    def __init__(self, reporter: FailureReporter) -> None:
        self.on_stop: Callable[[], None] | None = None
        self._reporter = reporter
        self._probes: list[Probe] = []
        self._stopped = threading.Event()
        # Listing a folder from thousands of ranks each second would load a shared file system.
        self.interval_s = _INTERVAL_S * max(1.0, min(5.0, reporter.rank.world_size / _MANY_RANKS))
        self._rounds = 0
        self._ending = False
        self._threads = [self._thread("file-watcher", lambda: self._watch([self._probe_files]))]

    def start(self) -> None:
        """Begin to poll the attempt folder."""
        self._threads[0].start()

    def add(self, *probes: Probe) -> None:
        """Begin to poll what asks the store; to be called once."""
        self._probes.extend(probes)
        threads = [self._thread("peer-watcher", lambda: self._watch(self._probes, counts=True))]
        if self._reporter.rank.rank != 0:
            threads.append(self._thread("store-watcher", self._watch_store))
        self._threads += threads
        for thread in threads:
            thread.start()

    def stop(self) -> None:
        """Stop polling; from now on ranks may leave in any order."""
        self._stopped.set()
        if self.on_stop is not None:
            self.on_stop()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_JOIN_S)

    def _thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=target, name=name, daemon=True)

    def _watch(self, probes: Iterable[Probe], *, counts: bool = False) -> None:
        complained = False
        while not self._stopped.wait(self.interval_s):
            for probe in probes:
                try:
                    why = probe()
                except Exception:
                    # Whatever is wrong with a look, the next one has to come.
                    if not complained:
                        log.exception("watching the other ranks failed once")
                    complained, why = True, None
                if why is not None:
                    self._ending = True
                    self._leave(why)
                    return
            self._rounds += counts

    def _leave(self, why: str) -> None:
        # Rank 0 holds the store, in which the others have yet to read why they end.
        if not self._stopped.wait(_GRACE_S + (self.interval_s if self._reporter.rank.rank == 0 else 0.0)):
            self._reporter.leave_for_peer(why)

    def _watch_store(self) -> None:
        stillness = Stillness(self.interval_s)
        limit_s = _STORE_SILENCE_S + 3 * self.interval_s
        while not self._stopped.wait(self.interval_s):
            if stillness.look(self._rounds) > limit_s and not self._ending:
                node = self._reporter.rank.hosts[0]
                why = (
                    f"rank 0 on {node} shows no sign of life since {stillness.still_s:.0f} s: its store does not "
                    "answer; it was stopped, or its host stands still"
                )
                self._reporter.report_for(0, kind="hang", message=why, stacks=None, step=self._reporter.step)
                self._reporter.leave_for_peer(why)

    def _probe_files(self) -> str | None:
        attempt = self._reporter.rank.attempt
        others = [failure for failure in read_failures(attempt) if failure.rank != self._reporter.rank.rank]
        if others:
            return f"rank {others[0].rank} on {others[0].node} failed: {others[0].exception}: {others[0].message}"
        outcome = read_outcome(attempt)
        return f"the attempt failed: {outcome.reason}" if outcome and outcome.kind == "failed" else None
