"""Which rank the others wait for, told from what all of them say."""

from __future__ import annotations

from typing import Any

from hpjob.runtime.health.diagnosis import RankState, diagnose


def state(rank: int, *, waits: bool = True, **changes: Any) -> RankState:
    values = {"node": f"n{rank // 4}", "step": 7, "phase": "step", "still_s": 31.0, "where": "train_step (engine.py:1)"}
    return RankState(rank=rank, waits=waits, **(values | {"counts": {"world": 20}} | changes))


def test_the_rank_that_did_not_arrive_is_named() -> None:
    states = [state(rank, counts={"world": 20 - (rank == 5)}, waits=rank != 5) for rank in range(8)]
    verdict = diagnose(states)
    assert verdict.ranks == (5,)
    assert "rank 5 on n1 hangs: no progress for 31 s in step 7 (step)" in verdict.message
    assert "7 ranks wait for it" in verdict.message


def test_where_all_seem_to_compute_the_counts_decide() -> None:
    """On GPUs the host of a rank that waits may be anywhere."""
    states = [state(rank, counts={"world": 20 - (rank == 5)}, waits=False) for rank in range(8)]
    assert diagnose(states).ranks == (5,)


def test_a_rank_that_waits_for_the_one_that_hangs_is_not_blamed() -> None:
    """Ranks 1 and 2 share a group; 1 waits there, so that 0 waits for 1 in a group of theirs."""
    states = [
        state(0, counts={"01": 4, "world": 9}),
        state(1, counts={"01": 3, "12": 6, "world": 9}),
        state(2, counts={"12": 5, "world": 9}),
    ]
    assert diagnose(states).ranks == (2,)


def test_of_two_that_are_behind_the_one_that_waits_is_not_blamed() -> None:
    """A receive was posted ahead of time, so no counter tells that rank 1 waits for rank 2."""
    states = [state(0), state(1, counts={"world": 19}), state(2, counts={"world": 19}, waits=False), state(3)]
    assert diagnose(states).ranks == (2,)


def test_all_wait_for_each_other() -> None:
    verdict = diagnose([state(rank) for rank in range(4)])
    assert verdict.ranks == ()
    assert "all wait for each other" in verdict.message


def test_a_run_of_one_rank() -> None:
    verdict = diagnose([state(0, waits=False)])
    assert verdict.ranks == (0,)
    assert "wait for it" not in verdict.message


def test_a_rank_that_said_nothing() -> None:
    verdict = diagnose([state(0)], missing=[3])
    assert (verdict.ranks, verdict.message) == ((3,), "rank 3 never said where it is")


def test_a_state_survives_the_store() -> None:
    assert RankState.load(state(3).dump().encode()) == state(3)
