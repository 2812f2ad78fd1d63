"""How long a rank may be silent, by what it is doing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hpjob.runtime.health.progress import Progress, Stillness, floor_from_env
from hpjob.runtime.health.stacks import all_stacks, innermost, last_dump, waits_for_others


def trained(progress: Progress, *durations: float) -> float:
    """Do steps; return the allowance of the next."""
    for step, duration in enumerate(durations, start=1):
        progress.begin_step(step)
        progress.begin_compute(step)
        progress.end_step(duration)
    progress.begin_step(len(durations) + 1)
    return progress.phase.allowance_s


def test_set_up_and_the_first_step_get_the_long_allowance() -> None:
    progress = Progress(30.0, 1800.0)
    assert progress.phase.allowance_s == 1800.0
    progress.begin_step(1)
    progress.begin_compute(1)
    assert (progress.phase.name, progress.phase.allowance_s) == ("first step", 1800.0)


def test_normal_steps_get_the_floor_and_slow_ones_a_multiple() -> None:
    assert trained(Progress(30.0, 1800.0), 5.0, *[0.2] * 10) == 30.0
    assert trained(Progress(30.0, 1800.0), 5.0, *[1.0] * 10, 9.0) == 45.0
    assert trained(Progress(30.0, 1800.0), 5.0, 9.0, *[1.0] * 30) == 30.0
    assert trained(Progress(30.0, 1800.0), 5.0, *[900.0] * 5) == 1800.0


def test_right_after_a_long_compilation_more_may_come() -> None:
    assert trained(Progress(30.0, 1800.0), 200.0, 1.0) == 400.0
    assert trained(Progress(30.0, 1800.0), 200.0, 1.0, 1.0, 1.0) == 30.0


def test_something_slow_is_announced_and_then_over() -> None:
    progress = Progress(30.0, 1800.0)
    allowance = trained(progress, *[1.0] * 5)
    with progress.during("evaluation"):
        assert (progress.phase.name, progress.phase.allowance_s) == ("evaluation", 1800.0)
    assert progress.phase.allowance_s == allowance


@pytest.mark.parametrize(("text", "floor"), [("7.5", 7.5), ("soon", 30.0), ("0", 0.0)])
def test_floor_from_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, floor: float) -> None:
    monkeypatch.setenv("HPJOB_HANG_FLOOR_S", text)
    assert floor_from_env() == floor
    assert Progress(floor, 1800.0).watches is (floor > 0)


def test_time_in_which_the_process_did_not_run_is_no_hang() -> None:
    now = [0.0]
    stillness = Stillness(1.0, clock=lambda: now[0])
    stillness.look("a")
    for _ in range(10):
        now[0] += 1.0
        still = stillness.look("a")
    assert still == 10.0
    now[0] += 3600.0  # suspended by Slurm
    assert stillness.look("a") == 13.0
    assert stillness.look("b") == 0.0


def test_a_thread_that_waits_is_told_from_one_that_computes() -> None:
    class Work:
        def wait(self) -> bool:
            return waits_for_others(sys._getframe(1))

    assert Work().wait()
    assert not waits_for_others(sys._getframe())
    assert not waits_for_others(None)
    assert "test_a_thread_that_waits_is_told_from_one_that_computes" in in_another_thread(all_stacks)


def test_where_a_thread_is_names_the_code_that_called_a_library() -> None:
    gate, inside = threading.Event(), threading.Event()

    def work() -> None:
        inside.set()
        gate.wait()

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    try:
        for _ in range(10_000):
            where = innermost(sys._current_frames()[thread.ident or 0])
            if "called by" in where:
                break
            gate.wait(0.01)
        assert "(threading.py:" in where and "called by work (test_progress.py:" in where
    finally:
        gate.set()
        thread.join()
    assert innermost(None) == "?"


def in_another_thread(work: Callable[[], str]) -> str:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_a_dump_counts_only_while_nothing_follows(tmp_path: Path) -> None:
    log = tmp_path / "log"
    dump = 'Timeout (0:00:10)!\nThread 0x00007f (most recent call first):\n  File "x.py", line 1 in work\n'
    log.write_text("step 1\n" + dump)
    assert last_dump(log) == dump.rstrip()
    log.write_text("step 1\n" + dump + "step 2\n")
    assert last_dump(log) == ""
    assert last_dump(tmp_path / "none") == ""
