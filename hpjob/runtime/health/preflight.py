"""Looks at all nodes before the first step, and ends the attempt where one of them could not train.

The ranks talk over the store alone, before any group of ranks is formed: a node whose GPU, mount or clock is broken
would otherwise show as a hang or an error of somebody else.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass

import torch

from hpjob.core.errors import UserInputError
from hpjob.plan.model import Axis, Plan
from hpjob.runtime.failures import FailureReporter, PeerLostError, PreflightError
from hpjob.runtime.health.node_check import (
    NodeReport,
    check_device,
    find_probe,
    free_memory_gib,
    versions,
    write_probe,
)
from hpjob.runtime.health.node_verdict import NodeVerdict, Problem, judge
from hpjob.runtime.rendezvous import PeerStore

log = logging.getLogger(__name__)
LIMIT_S = 60.0
"""Once all ranks are there; longer than any check takes on a sound node."""
_POLL_S = 0.02
_TELL_S = 10.0
_KEY = "hpjob/preflight"
_FOLDER = "preflight"


def wanted() -> bool:
    """Whether nodes are looked at; ``HPJOB_PREFLIGHT=0`` leaves it out."""
    return os.environ.get("HPJOB_PREFLIGHT", "1") != "0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """The checks of one rank.

    Attributes:
        reporter: Whose rank it is.
        plan: Says how much memory is needed.
        device: Of this rank.
        store: Where ranks tell each other.
        arrival_s: How long to wait for the last rank to be there.
    """

    reporter: FailureReporter
    plan: Plan
    device: torch.device
    store: PeerStore
    arrival_s: float

    def run(self) -> NodeVerdict:
        """Check this node and learn what all found.

        Returns:
            The verdict, which then has warnings at most.

        Raises:
            PreflightError: This rank's node is not fit.
            PeerLostError: Another node is not fit, or a rank did not come.
            UserInputError: What is wrong would be wrong on any node; raised by rank 0.
        """
        rank = self.reporter.rank
        folder = rank.attempt.path / _FOLDER
        leads = rank.hosts.index(rank.node) == rank.rank if rank.node in rank.hosts else True
        problem = write_probe(folder, rank.node) if leads else None
        device_problem = check_device(self.device)
        self.store.say_once(f"{_KEY}/here/{rank.rank}", "1")
        if rank.rank == 0:
            asked_at = self._ask()
        else:
            self._wait(f"{_KEY}/go", self.arrival_s + LIMIT_S, "rank 0 did not begin the preflight")
        clock = time.time()
        if leads and problem is None and rank.rank != 0:
            problem = find_probe(folder, rank.hosts[0])
        free_gib, total_gib = free_memory_gib(self.device)
        report = NodeReport(
            rank=rank.rank,
            node=rank.node,
            device=self.device.type,
            device_problem=device_problem,
            free_gib=free_gib,
            total_gib=total_gib,
            file_problem=problem,
            versions=versions(),
            clock=clock,
        )
        self.store.say_once(f"{_KEY}/report/{rank.rank}", report.dump())
        if rank.rank == 0:
            self.store.say_once(f"{_KEY}/verdict", self._judge(asked_at).dump())
        text = self._wait(f"{_KEY}/verdict", 2 * LIMIT_S, "rank 0 did not end the preflight")
        verdict = NodeVerdict.load(text)
        self._act(verdict.problems)
        return verdict

    def _ask(self) -> float:
        deadline = time.monotonic() + self.arrival_s
        for other in range(self.reporter.rank.world_size):
            left_s = max(0.0, deadline - time.monotonic())
            node = self.reporter.rank.hosts[other]
            self._wait(f"{_KEY}/here/{other}", left_s, f"rank {other} on {node} did not come")
        asked_at = time.time()
        self.store.say_once(f"{_KEY}/go", "1")
        return asked_at

    def _judge(self, asked_at: float) -> NodeVerdict:
        rank = self.reporter.rank
        deadline = time.monotonic() + LIMIT_S
        reports: list[NodeReport] = []
        answered_at: dict[int, float] = {}
        silent: list[Problem] = []
        for other in range(rank.world_size):
            text = self._poll(f"{_KEY}/report/{other}", max(0.0, deadline - time.monotonic()))
            answered_at[other] = time.time()
            if text is None:
                silent.append(self._silent(other))
            else:
                reports.append(NodeReport.load(text))
        if silent:
            return NodeVerdict(problems=tuple(silent))
        folder = rank.attempt.path / _FOLDER
        found = {node: find_probe(folder, node) for node in dict.fromkeys(rank.hosts)}
        unseen = {node: why for node, why in found.items() if why is not None}
        need = {report.rank: self._need_gib(report.rank) for report in reports}
        shutil.rmtree(folder, ignore_errors=True)
        return judge(reports, need_gib=need, asked_at=asked_at, answered_at=answered_at, unseen=unseen)

    def _silent(self, rank: int) -> Problem:
        node = self.reporter.rank.hosts[rank]
        message = f"{node}: rank {rank} has not finished its checks within {LIMIT_S:.0f} s"
        self.reporter.report_for(rank, kind="preflight", message=message, stacks=None, step=0)
        return Problem(
            check="answer", message=message, hint="its GPU or its file system hangs", fault="node", ranks=(rank,)
        )

    def _need_gib(self, rank: int) -> float:
        stage = self.plan.degrees.coordinates(rank)[Axis.PP]
        return max((entry.total_gib for entry in self.plan.memory if entry.pp_rank == stage), default=0.0)

    def _act(self, problems: tuple[Problem, ...]) -> None:
        if not problems:
            return
        rank = self.reporter.rank
        persons = [problem for problem in problems if problem.fault == "person"]
        if persons:
            if rank.rank == 0:
                text = "\n".join(f"preflight, {problem.check}: {problem.message}" for problem in persons)
                raise UserInputError(text, hint=persons[0].hint)
            raise PeerLostError("the preflight failed", hint=persons[0].hint)
        for problem in problems:
            if rank.rank in problem.ranks:
                raise PreflightError(f"preflight, {problem.check}: {problem.message}", hint=problem.hint)
        self._let_them_tell()
        named = "; ".join(f"{problem.check}: {problem.message}" for problem in problems)
        raise PeerLostError(f"the preflight failed on another node: {named}", hint=problems[0].hint)

    def _let_them_tell(self) -> None:
        """Leave only once a rank with a problem has written it down: with rank 0 its store ends, and that rank too."""
        deadline = time.monotonic() + _TELL_S
        with suppress(RuntimeError):
            while self.store.failure() is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)

    def _wait(self, key: str, within_s: float, otherwise: str) -> str:
        text = self._poll(key, within_s)
        if text is None:
            raise PeerLostError(f"{otherwise} within {within_s:.0f} s", hint="its log tells what it was doing")
        return text

    def _poll(self, key: str, within_s: float) -> str | None:
        deadline = time.monotonic() + within_s
        try:
            while (text := self.store.read(key)) is None:
                if time.monotonic() > deadline:
                    return None
                time.sleep(_POLL_S)
        except RuntimeError as error:
            raise PeerLostError("rank 0 went away during the preflight", hint="its log tells why") from error
        return text
