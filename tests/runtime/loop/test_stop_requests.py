"""Signal handlers only set a flag; a forked child's signals are none of ours."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpjob.runtime.signals import STOP_FILE_CODE, STOP_SIGNALS, StopRequest, SupersededError, describe


@pytest.fixture
def request_() -> Iterator[StopRequest]:
    old = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    stop = StopRequest()
    stop.install()
    yield stop
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_sets_the_flag(request_: StopRequest, number: signal.Signals) -> None:
    assert request_.code() == 0
    os.kill(os.getpid(), number)
    assert request_.code() == number
    assert describe(request_.code()) == f"signal {number.name}"


def test_first_signal_is_the_one_that_counts(request_: StopRequest) -> None:
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM):
        os.kill(os.getpid(), number)
    assert request_.code() == signal.SIGUSR2


def test_forked_child_ignores_signals(request_: StopRequest) -> None:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(request_.code())
    assert os.waitpid(child, 0)[1] == 0


def test_stop_file_counts_as_a_request(tmp_path: Path) -> None:
    stop = StopRequest(tmp_path / "STOP")
    (tmp_path / "STOP").touch()
    assert stop.code() == STOP_FILE_CODE
    assert describe(stop.code()) == "stop file"


def test_an_attempt_that_was_cut_off_stops_when_a_later_one_has_begun(tmp_path: Path) -> None:
    """It must not even save: the later one writes the same files."""
    stop = StopRequest(tmp_path / "STOP")
    stop.next_attempt = tmp_path / "0001"
    (tmp_path / "STOP").touch()
    stop.next_attempt.mkdir()
    with pytest.raises(SupersededError, match="attempt 0001 trains this run now"):
        stop.code()
