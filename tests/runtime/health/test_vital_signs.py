"""What can be seen from outside of a process that works, waits for a file, or does nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpjob.runtime.health.stacks import deciding_frame
from hpjob.runtime.health.vital_signs import IDLE_S, VitalSigns, limit_from_env

STILL_S = 60.0
LONG_S = 120.0
SLEEPS = "import time; time.sleep(600)"
WAITS_FOR_A_LOCK = "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()"
WORKS = "while True: pass"
SLEEPS_WHILE_A_CHILD_WORKS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WORKS!r}])"
SLEEPS_WHILE_A_THREAD_WORKS = """
import threading, time
def work():
    while True: pass
threading.Thread(target=work).start()
time.sleep(600)
"""
READS_A_FILE_THAT_NEVER_COMES = "import sys; open(sys.argv[1]).read()"


@contextmanager
def process(program: str, *arguments: str) -> Iterator[int]:
    """Run a Python program in a session of its own; end all of it afterwards."""
    command = [sys.executable, "-S", "-c", program, *arguments]
    with subprocess.Popen(command, start_new_session=True) as started:
        try:
            yield started.pid
        finally:
            os.killpg(started.pid, 9)


def wait_until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + LONG_S
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    return found


@pytest.mark.parametrize("program", [SLEEPS, WAITS_FOR_A_LOCK], ids=["timer", "lock"])
def test_a_process_that_sleeps_on_purpose_does_nothing(program: str) -> None:
    with process(program) as pid:
        signs = VitalSigns(0.1, IDLE_S, pid)
        assert wait_until(lambda: signs.look(STILL_S) > 1.0)


@pytest.mark.parametrize(
    "program", [WORKS, SLEEPS_WHILE_A_CHILD_WORKS, SLEEPS_WHILE_A_THREAD_WORKS], ids=["self", "child", "thread"]
)
def test_a_process_that_works_or_has_it_done_is_alive(program: str) -> None:
    with process(program) as pid:
        signs = VitalSigns(0.1, IDLE_S, pid)
        idle_s = []
        for _ in range(30):
            time.sleep(0.1)
            idle_s.append(signs.look(STILL_S))
        assert idle_s[-1] < 1.0


def test_who_waits_for_a_file_is_alive(tmp_path: Path) -> None:
    pipe = tmp_path / "file"
    os.mkfifo(pipe)
    with process(READS_A_FILE_THAT_NEVER_COMES, str(pipe)) as pid:
        signs = VitalSigns(0.1, IDLE_S, pid)
        # The same program asleep would have been idle by then.
        with process(SLEEPS) as other:
            reference = VitalSigns(0.1, IDLE_S, other)
            idle_s = []

            def looked() -> bool:
                idle_s.append(signs.look(STILL_S))
                return reference.look(STILL_S) > 1.0

            assert wait_until(looked)
        assert idle_s[-1] == 0.0


def test_nobody_looks_at_a_process_that_makes_progress() -> None:
    with process(SLEEPS) as pid:
        signs = VitalSigns(0.1, IDLE_S, pid)
        assert wait_until(lambda: signs.look(STILL_S) > 0.2)
        assert signs.look(1.0) == 0.0
        assert signs.look(STILL_S) == 0.0
        off = VitalSigns(0.1, 0.0, pid)
        assert [off.look(STILL_S) for _ in range(3)] == [0.0] * 3


def test_a_process_that_is_gone_is_not_called_idle() -> None:
    with process(SLEEPS) as pid:
        signs = VitalSigns(0.1, IDLE_S, pid)
    assert [signs.look(STILL_S) for _ in range(3)] == [0.0] * 3


@pytest.mark.parametrize(("value", "limit"), [(None, IDLE_S), ("7.5", 7.5), ("0", 0.0), ("soon", IDLE_S)])
def test_the_limit_can_be_set(monkeypatch: pytest.MonkeyPatch, value: str | None, limit: float) -> None:
    monkeypatch.delenv("HPJOB_IDLE_LIMIT_S", raising=False)
    if value is not None:
        monkeypatch.setenv("HPJOB_IDLE_LIMIT_S", value)
    assert limit_from_env() == limit


def test_who_waits_for_a_thread_is_where_that_one_is() -> None:
    begun, over, names = threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        over.wait()

    def look() -> None:
        begun.wait()
        end = time.monotonic() + LONG_S
        while "work" not in names and time.monotonic() < end:
            frame = deciding_frame()
            names.clear()
            while frame is not None:
                names.append(frame.f_code.co_name)
                frame = frame.f_back
        over.set()

    worker, watcher = threading.Thread(target=work), threading.Thread(target=look)
    worker.start()
    watcher.start()
    worker.join()
    watcher.join()
    assert "work" in names
