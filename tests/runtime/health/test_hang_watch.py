"""The ranks' watchers in one process: who notices, who is named, who writes the record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import read_failures
from hpjob.runtime.failures import FailureReporter
from hpjob.runtime.health import hang_watch
from hpjob.runtime.health.hang_watch import HangWatch
from hpjob.runtime.health.progress import Progress, Stillness
from hpjob.runtime.rank import Rank
from hpjob.runtime.rendezvous import PeerStore, TCPStore

WORLD = 4
HOSTS = ("n1", "n1", "n2", "n2")


class Left(Exception):
    """Stands for the end of the process."""


class Signs:
    """Vital signs of a rank that has done nothing since it was told to."""

    limit_s = 40.0

    def __init__(self) -> None:
        self.idle = False

    def look(self, still_s: float) -> float:
        return still_s if self.idle else 0.0


class Ranks:
    """Four ranks that look in turns; seconds pass only when told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attempt = AttemptDir(folder)
        self.now = 0.0
        self.waits = [True] * WORLD
        self.counts = [10] * WORLD
        self.signs = [Signs() for _ in range(WORLD)]
        self._server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._looking = 0
        monkeypatch.setattr(hang_watch, "waits_for_others", lambda frame: self.waits[self._looking])
        monkeypatch.setattr(hang_watch, "_ANSWER_S", 0.0)
        self.reporters = [self._reporter(rank) for rank in range(WORLD)]
        self.watches = [self._watch(rank) for rank in range(WORLD)]

    def _reporter(self, rank: int) -> FailureReporter:
        own = Rank(
            rank=rank,
            local_rank=rank % 2,
            hosts=HOSTS,
            node=HOSTS[rank],
            master_addr="127.0.0.1",
            run_dir=RunDir(self.attempt.path),
            attempt=self.attempt,
        )
        reporter = FailureReporter(own, Progress(30.0, 1800.0))

        def leave(why: str, name: str = "Hang") -> Any:
            reporter._report("hang", name, why, "stack")
            raise Left

        reporter.leave_for_hang = leave  # type: ignore[method-assign]
        return reporter

    def _watch(self, rank: int) -> HangWatch:
        store = PeerStore("127.0.0.1", self._server.port, rank=rank, world_size=WORLD)
        watch = HangWatch(
            self.reporters[rank],
            store,
            pp_size=1,
            interval_s=1.0,
            counts=lambda: {"world": self.counts[rank]},
            signs=cast(Any, self.signs[rank]),
        )
        watch._stillness = Stillness(1.0, clock=lambda: self.now)
        watch._blocked = cast(Any, type("Silent", (), {"still_running": lambda self: None})())
        return watch

    def train(self, steps: int) -> None:
        for step in range(1, steps + 1):
            for reporter in self.reporters:
                reporter.progress.begin_step(step)
                reporter.progress.begin_compute(step)
                reporter.progress.end_step(0.5)
                reporter.progress.begin_step(step + 1)

    def enter(self, name: str) -> None:
        """Let all ranks begin something that may be slow."""
        for reporter in self.reporters:
            reporter.progress.enter(name, 6)

    def look(self, seconds: int, *, without: tuple[int, ...] = ()) -> dict[int, str]:
        """Let seconds pass; return what each rank was told, once one of them was told something."""
        for _ in range(seconds):
            self.now += 1.0
            told = {}
            for rank in range(WORLD):
                if rank in without:
                    continue
                self._looking = rank
                try:
                    why = self.watches[rank].probe()
                except Left:
                    why = "left"
                if why is not None:
                    told[rank] = why
            if told:
                return told
        return {}


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    found = Ranks(tmp_path, monkeypatch)
    found.train(5)
    yield found


def test_the_rank_that_hangs_leaves_with_its_stack_and_the_others_are_told(ranks: Ranks) -> None:
    ranks.counts[2], ranks.waits[2] = 9, False
    assert ranks.look(30) == {}
    told = ranks.look(3)
    assert told[2] == "left"
    assert all("rank 2 on n2 hangs" in told[rank] for rank in (0, 1, 3))
    (failure,) = read_failures(ranks.attempt)
    assert (failure.rank, failure.kind, failure.exception) == (2, "hang", "Hang")


def test_progress_of_the_counters_alone_is_enough(ranks: Ranks) -> None:
    for _ in range(4):
        assert ranks.look(20) == {}
        ranks.counts = [count + 1 for count in ranks.counts]


def test_a_rank_that_cannot_answer_gets_its_record_from_another(ranks: Ranks) -> None:
    ranks.counts[3], ranks.waits[3] = 9, False
    assert ranks.look(1) == {}
    told = ranks.look(40, without=(3,))
    assert "rank 3 on n2 hangs" in told[0]
    (failure,) = read_failures(ranks.attempt)
    assert (failure.rank, failure.node, failure.kind, failure.reported_by) == (3, "n2", "hang", 0)


def test_where_rank_zero_cannot_look_another_does(ranks: Ranks) -> None:
    ranks.counts[0], ranks.waits[0] = 9, False
    assert ranks.look(1) == {}
    assert ranks.look(40, without=(0,)) == {}
    told = ranks.look(10, without=(0,))
    assert "rank 0 on n1 hangs" in told[1]


def test_a_deadlock_blames_nobody(ranks: Ranks) -> None:
    told = ranks.look(40)
    assert told[0] == "left" and "all wait for each other" in told[1]
    (failure,) = read_failures(ranks.attempt)
    assert (failure.rank, failure.exception) == (0, "Deadlock")


def test_slow_things_are_given_time(ranks: Ranks) -> None:
    ranks.enter("evaluation")
    ranks.counts[2], ranks.waits[2] = 9, False
    assert ranks.look(600) == {}


def test_who_does_nothing_is_given_little_time_even_for_something_slow(ranks: Ranks) -> None:
    ranks.enter("save")
    ranks.waits[2], ranks.signs[2].idle = False, True
    assert ranks.look(39) == {}
    told = ranks.look(8)
    assert told[2] == "left" and "rank 2 on n2 hangs" in told[0] and "(save)" in told[0]
    (failure,) = read_failures(ranks.attempt)
    assert (failure.rank, failure.kind, failure.exception) == (2, "hang", "Hang")


@pytest.mark.parametrize("case", ["all wait", "another one works", "a rank has not come", "switched off"])
def test_doing_nothing_alone_is_no_hang(ranks: Ranks, case: str) -> None:
    ranks.enter("set-up")
    for signs in ranks.signs:
        signs.idle = True
        signs.limit_s = 0.0 if case == "switched off" else signs.limit_s
    if case != "all wait":
        ranks.waits[2] = False
    if case == "another one works":
        ranks.waits[3], ranks.signs[3].idle = False, False
    assert ranks.look(100, without=(3,) if case == "a rank has not come" else ()) == {}


def test_it_can_be_switched_off(ranks: Ranks) -> None:
    for reporter in ranks.reporters:
        reporter.progress._floor_s = 0.0
    assert ranks.look(100) == {}
