"""What is watched and checked from the moment on that the ranks can talk to each other."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from hpjob.plan.model import Plan
from hpjob.runtime.failures import FailureReporter, PreflightError
from hpjob.runtime.health.hang_watch import HangWatch
from hpjob.runtime.health.link_check import as_event, measure, slow_links
from hpjob.runtime.health.preflight import LIMIT_S, Preflight, wanted
from hpjob.runtime.mesh import Mesh
from hpjob.runtime.rank import Rank
from hpjob.runtime.records import AttemptRecords
from hpjob.runtime.rendezvous import PeerStore, choose_device
from hpjob.runtime.watcher import PeerWatcher

log = logging.getLogger(__name__)


def usable_device(rank: Rank, plan: Plan) -> torch.device:
    """Return this rank's device.

    Raises:
        PreflightError: Its GPU cannot even be opened.
    """
    try:
        return choose_device(rank, plan)
    except RuntimeError as error:
        raise PreflightError(
            f"preflight, device: {rank.node}: its GPU cannot be used: {str(error).strip().splitlines()[0]}",
            hint="`nvidia-smi` on the node shows its GPUs; tell the administrator of the cluster",
        ) from error


def watch_peers(watcher: PeerWatcher, reporter: FailureReporter, peers: PeerStore, plan: Plan) -> HangWatch:
    """Have this rank and the others tell each other what they do and when they fail."""
    hangs = HangWatch(reporter, peers, pp_size=plan.degrees.pp, interval_s=watcher.interval_s)
    reporter.notify = peers.tell_failure
    peers.on_silent = hangs.report_silent
    watcher.on_stop = peers.leave
    watcher.add(hangs.probe, peers.probe)
    return hangs


class StartChecks:
    """The preflight: nodes before groups of ranks are formed, links as soon as they are.

    Args:
        reporter: Whose rank it is.
        records: Where the findings go.
        plan: What is about to be trained.
        device: Of this rank.
    """

    def __init__(self, reporter: FailureReporter, records: AttemptRecords, plan: Plan, device: torch.device) -> None:
        self._reporter = reporter
        self._records = records
        self._plan = plan
        self._device = device

    def nodes(self, peers: PeerStore, arrival_s: float) -> None:
        """Look at all nodes, without any group of ranks.

        Raises:
            HpjobError: One of them could not train; the rank that it concerns says so.
        """
        if not wanted():
            return
        started = time.perf_counter()
        preflight = Preflight(
            reporter=self._reporter, plan=self._plan, device=self._device, store=peers, arrival_s=arrival_s
        )
        with self._reporter.progress.during("preflight"):
            verdict = preflight.run()
        duration_s = round(time.perf_counter() - started, 3)
        self._records.event("preflight", duration_s=duration_s, warnings=verdict.warnings)
        self._warn(verdict.warnings)

    def links(self, mesh: Mesh) -> None:
        """Measure the groups of ranks against each other; a collective of all ranks.

        Raises:
            PreflightError: This node's links hardly work, while those of others do.
        """
        if not wanted():
            return
        started = time.perf_counter()
        with self._reporter.progress.during("preflight of links", LIMIT_S):
            rates = measure(mesh, self._device)
        duration_s = round(time.perf_counter() - started, 3)
        self._records.event("links", duration_s=duration_s, rates=as_event(rates))
        if self._device.type != "cuda":
            return  # what the ranks of a CPU reach depends on who else computes there
        rank = self._reporter.rank
        warnings, suspects = slow_links(rates, rank.hosts)
        self._warn(warnings)
        if rank.node in suspects:
            raise PreflightError(
                f"preflight, links: {rank.node}: {suspects[rank.node]}",
                hint="`ibstat` and `nvidia-smi nvlink --status` on the node show its links",
            )

    def _warn(self, warnings: Sequence[str]) -> None:
        if self._reporter.rank.rank == 0:
            for warning in warnings:
                log.warning("preflight: %s", warning)
