"""What srun says about ranks."""

from __future__ import annotations

import pytest

from hpjob.slurm.srun_log import parse_srun_log


def test_first_killed_task_and_what_followed() -> None:
    text = (
        "srun: cluster configuration lacks support for cpu binding\n"
        "srun: error: n1: task 3: Killed\n"
        "srun: Terminating StepId=7.0\n"
        "slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-03-01T10:00:00 ***\n"
        "srun: error: n2: tasks 4-5,7: Killed\n"
        "srun: error: n1: tasks 0-2: Terminated\n"
    )
    first, second, third = parse_srun_log(text)
    assert (first.node, first.ranks, first.what, first.after_abort) == ("n1", (3,), "Killed", False)
    assert (second.ranks, second.after_abort) == ((4, 5, 7), True)
    assert (third.ranks, third.by_stop_signal) == ((0, 1, 2), True)


@pytest.mark.parametrize(
    ("words", "exited", "stop"),
    [
        ("Exited with exit code 1", True, False),
        ("Out Of Memory", False, False),
        ("Segmentation fault (core dumped)", False, False),
        ("User defined signal 2", False, True),
        ("Terminated", False, True),
    ],
)
def test_kinds_of_ends(words: str, exited: bool, stop: bool) -> None:
    (end,) = parse_srun_log(f"srun: error: node-01.cluster: task 12: {words}\n")
    assert (end.node, end.ranks, end.what) == ("node-01.cluster", (12,), words)
    assert (end.exited, end.by_stop_signal) == (exited, stop)


def test_a_failed_node_stands_for_all_its_ranks() -> None:
    (end,) = parse_srun_log("srun: error: Node failure on n2\nsrun: Job step aborted: Waiting up to 32 seconds\n")
    assert (end.node, end.ranks, end.what) == ("n2", (), "Node failure")


@pytest.mark.parametrize(
    "line",
    [
        "srun: launch/slurm: _step_signal: Terminating StepId=4.0",
        "srun: Force Terminated StepId=7.0",
        "srun: Force Terminated job step 7.0",
    ],
)
def test_all_forms_of_an_abort_are_known(line: str) -> None:
    (end,) = parse_srun_log(f"{line}\nsrun: error: n1: task 0: Killed\n")
    assert end.after_abort


def test_no_news_is_no_end() -> None:
    assert parse_srun_log("srun: Job 7 step creation temporarily disabled, retrying\n") == []
