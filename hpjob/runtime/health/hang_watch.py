"""Finds out that no rank makes progress any more, and which one the others wait for."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from hpjob.runtime.failures import FailureReporter
from hpjob.runtime.health.diagnosis import RankState, Verdict, diagnose
from hpjob.runtime.health.progress import Stillness
from hpjob.runtime.health.stacks import BlockedDump, deciding_frame, innermost, last_dump, waits_for_others
from hpjob.runtime.health.vital_signs import VitalSigns
from hpjob.runtime.rendezvous import PeerStore

log = logging.getLogger(__name__)
_DEPUTY_S = 15.0
"""Rank 0 looks first; should it be unable to, any other does after so much more time."""
_ANSWER_S = 3.0
"""A rank that is told that it hangs has so long to say where."""
_LOOKS_PER_COMPARISON = 5
"""Comparing what all ranks say costs a question to the store for each of them."""
_VERDICT_KEY = "hpjob/hang"


class HangWatch:
    """One look a second at this rank's progress; a probe of the watcher's thread.

    Args:
        reporter: Knows what the main thread does.
        store: Where ranks tell each other.
        pp_size: Pipeline stages: their messages are not the same number on all ranks.
        interval_s: Between two looks.
        counts: Returns the operations begun on each group so far; None = torch's own counters.
        signs: Tells for how long this process has done nothing; None = its own system's word.
    """

    def __init__(
        self,
        reporter: FailureReporter,
        store: PeerStore,
        *,
        pp_size: int,
        interval_s: float,
        counts: Callable[[], dict[str, int]] | None = None,
        signs: VitalSigns | None = None,
    ) -> None:
        self._reporter = reporter
        self._store = store
        self._interval_s = interval_s
        self._stillness = Stillness(interval_s)
        self._counts = counts or GroupCounts(pp_size)
        self._signs = signs or VitalSigns(interval_s)
        self._blocked = BlockedDump()
        self._looks = 0

    def probe(self) -> str | None:
        """Publish this rank's state; return why it should end, or leave at once where it is the cause."""
        self._blocked.still_running()
        try:
            verdict = self._look()
        except RuntimeError:
            return None  # the store does not answer, of which its own probe tells
        if verdict is None:
            return None
        rank = self._reporter.rank.rank
        if rank in verdict.ranks:
            self._reporter.leave_for_hang(verdict.message)
        if rank == 0 and not verdict.ranks:
            self._reporter.leave_for_hang(verdict.message, "Deadlock")
        return verdict.message

    def _look(self) -> Verdict | None:
        progress = self._reporter.progress
        counts = self._counts()
        still_s = self._stillness.look((progress.changes, counts))
        state = self._state(still_s, self._signs.look(still_s), counts)
        self._store.publish(state.dump())
        verdict = self._known()
        if verdict is not None or not progress.watches:
            return verdict
        self._looks += 1
        if still_s > _allowance_s(self._reporter):
            return self._judge(state)
        compares = state.rank == 0 and self._looks % _LOOKS_PER_COMPARISON == 0
        if compares and self._idle_long_enough(still_s):
            return self._judge_idle(state)
        return None

    def _idle_long_enough(self, seconds: float) -> bool:
        return 0 < self._signs.limit_s <= seconds

    def stop(self) -> None:
        """Expect no further sign of life of this process."""
        self._blocked.stop()

    def report_silent(self, rank: int, silence_s: float) -> str:
        """Write the failure record of a rank that cannot do it itself; return what to tell the others."""
        node = self._reporter.rank.hosts[rank]
        stacks = last_dump(self._reporter.rank.attempt.rank_log(rank))
        if stacks:
            message = (
                f"rank {rank} on {node} hangs: a call into C has kept Python from running for {silence_s:.0f} s; "
                "its log ends with where"
            )
        else:
            message = (
                f"rank {rank} on {node} shows no sign of life since {silence_s:.0f} s: it was killed or stopped, "
                "or its host stands still"
            )
        step = self._last_step(rank)
        self._reporter.report_for(rank, kind="hang", message=message, stacks=stacks or None, step=step)
        return message

    def _state(self, still_s: float, idle_s: float, counts: dict[str, int]) -> RankState:
        frame, rank = deciding_frame(), self._reporter.rank
        phase = self._reporter.progress.phase
        return RankState(
            rank=rank.rank,
            node=rank.node,
            step=phase.step,
            phase=phase.name,
            still_s=round(still_s, 1),
            idle_s=round(idle_s, 1),
            waits=waits_for_others(frame),
            where=innermost(frame),
            counts=counts,
        )

    def _known(self) -> Verdict | None:
        text = self._store.read(_VERDICT_KEY)
        if text is None:
            return None
        document = json.loads(text)
        return Verdict(ranks=tuple(document["ranks"]), message=document["message"])

    def _judge(self, own: RankState) -> Verdict | None:
        """Say which ranks hang, now that one has waited for as long as it may."""
        states = self._states(own)
        missing = [rank for rank in range(self._reporter.rank.world_size) if rank not in states]
        return self._announce(diagnose(list(states.values()), missing), states)

    def _judge_idle(self, own: RankState) -> Verdict | None:
        """Say which ranks hang, before that, if all that the others wait for do nothing at all."""
        states = self._states(own)
        if len(states) < self._reporter.rank.world_size:
            return None
        verdict = diagnose(list(states.values()))
        if not verdict.ranks or not all(self._idle_long_enough(states[rank].idle_s) for rank in verdict.ranks):
            return None
        return self._announce(verdict, states)

    def _states(self, own: RankState) -> dict[int, RankState]:
        """Return what all ranks last said of themselves."""
        states = {own.rank: own}
        for rank in range(self._reporter.rank.world_size):
            if rank != own.rank and (text := self._store.published(rank)) is not None:
                states[rank] = RankState.load(text)
        return states

    def _announce(self, verdict: Verdict, states: dict[int, RankState]) -> Verdict | None:
        log.error("%s", verdict.message)
        self._store.say_once(_VERDICT_KEY, json.dumps(asdict(verdict)))
        self._stand_in_for(verdict, states)
        return self._known()

    def _stand_in_for(self, verdict: Verdict, states: dict[int, RankState]) -> None:
        """Write the records of ranks that hang so badly that they cannot."""
        attempt, own = self._reporter.rank.attempt, self._reporter.rank.rank
        others = [rank for rank in verdict.ranks if rank != own]
        deadline = time.monotonic() + _ANSWER_S + self._interval_s
        while any(not attempt.failure(rank).exists() for rank in others) and time.monotonic() < deadline:
            time.sleep(0.2)
        for rank in others:
            step = states[rank].step if rank in states else None
            stacks = last_dump(attempt.rank_log(rank)) or None
            self._reporter.report_for(rank, kind="hang", message=verdict.message, stacks=stacks, step=step)

    def _last_step(self, rank: int) -> int | None:
        text = self._store.published(rank)
        return RankState.load(text).step if text is not None else None


def _allowance_s(reporter: FailureReporter) -> float:
    """Return for how long this rank may see no progress before it calls that a hang."""
    deputy_s = 0.0 if reporter.rank.rank == 0 else _DEPUTY_S
    return reporter.progress.phase.allowance_s + deputy_s


class GroupCounts:
    """Operations that this process has begun on each of its groups, as torch counts them.

    Args:
        pp_size: Groups along a pipeline carry messages, of which each rank has its own number: left out.
    """

    def __init__(self, pp_size: int) -> None:
        self._pp_size = pp_size

    def __call__(self) -> dict[str, int]:
        """Return the count of each group by a name that all its members share."""
        world = getattr(dist.distributed_c10d, "_world", None)
        if world is None:
            return {}
        counts = {}
        for group, name in list(world.pg_names.items()):
            ranks = dist.get_process_group_ranks(group)
            if group is not dist.group.WORLD and self._along_pipeline(ranks):
                continue
            for device, count in _begun(group).items():
                counts[f"{name}:{ranks[0]}-{ranks[-1]}:{device}"] = count
        return counts

    def _along_pipeline(self, ranks: list[int]) -> bool:
        stride = dist.get_world_size() // self._pp_size
        return self._pp_size > 1 and len({rank % stride for rank in ranks}) == 1


def _begun(group: dist.ProcessGroup) -> dict[str, int]:
    """Return the operations begun on a group for each kind of device; empty where its backend does not count."""
    counts = {}
    for device in group._device_types:
        try:
            backend: Any = group._get_backend(device)  # the stubs lack its counter
            counts[device.type] = int(backend._get_sequence_number_for_group())
        except (RuntimeError, AttributeError):
            continue
    return counts
