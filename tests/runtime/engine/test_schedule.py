"""Pipeline schedules as tables."""

from __future__ import annotations

import pytest

from hpjob.core.errors import UserInputError
from hpjob.plan.model import Pipeline
from hpjob.plan.schedule_zbv import zbv_orders
from hpjob.runtime.pipeline.schedule import Action, Kind, Schedule, build_schedule, channels, run_order, validate


def pipeline(num_microbatches: int, stages: int, style: str = "1f1b", chunks: int = 1) -> Pipeline:
    known = Pipeline(
        num_model_chunks=chunks,
        num_microbatches=num_microbatches,
        microbatch_size=1,
        layers_per_stage=(1,) * stages,
    )
    return known.model_copy(update={"style": style})


def most_in_flight(table: tuple[Action, ...]) -> int:
    live = peak = 0
    frees = all(action.kind is not Kind.WEIGHT for action in table)
    for action in table:
        # What a backward pass leaves for the weight gradients is held until they are done.
        live += {Kind.FORWARD: 1, Kind.BACKWARD: -1 if frees else 0, Kind.WEIGHT: -1}[action.kind]
        peak = max(peak, live)
    return peak


def test_1f1b_order() -> None:
    schedule = build_schedule(pipeline(3, 2), 2)
    assert " ".join(map(str, schedule.actions[0])) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert " ".join(map(str, schedule.actions[1])) == "1F0 1B0 1F1 1B1 1F2 1B2"


@pytest.mark.parametrize("pp_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 9])
def test_1f1b_is_valid_and_holds_as_few_microbatches_as_it_can(pp_size: int, num_microbatches: int) -> None:
    schedule = build_schedule(pipeline(num_microbatches, pp_size), pp_size)
    validate(schedule)
    for rank, table in enumerate(schedule.actions):
        assert most_in_flight(table) == min(pp_size - rank, num_microbatches)


@pytest.mark.parametrize(("pp_size", "chunks", "rounds"), [(2, 2, 1), (2, 3, 2), (4, 2, 2), (3, 4, 3)])
def test_interleaved(pp_size: int, chunks: int, rounds: int) -> None:
    count = pp_size * rounds
    schedule = build_schedule(pipeline(count, pp_size * chunks, "interleaved", chunks), pp_size)
    validate(schedule)
    assert schedule.stages_of(1) == [1 + chunk * pp_size for chunk in range(chunks)]
    for rank, table in enumerate(schedule.actions):
        warm_up = 2 * (pp_size - 1 - rank) + (chunks - 1) * pp_size
        assert most_in_flight(table) == min(warm_up + 1, count * chunks)


def test_interleaved_needs_whole_rounds() -> None:
    with pytest.raises(UserInputError, match="3 microbatches and pp 2"):
        build_schedule(pipeline(3, 4, "interleaved", 2), 2)


@pytest.mark.parametrize("pp_size", [2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 9, 16])
def test_zbv_is_valid_and_holds_no_more_than_1f1b(pp_size: int, num_microbatches: int) -> None:
    schedule = build_schedule(pipeline(num_microbatches, 2 * pp_size, "zbv", 2), pp_size)
    assert schedule.defers_weights
    assert schedule.stages_of(0) == [0, 2 * pp_size - 1]
    for table in schedule.actions:
        assert len(table) == 3 * 2 * num_microbatches
        # Halves of a stage of 1f1b, of which the first rank holds pp.
        assert most_in_flight(table) <= 2 * pp_size


def test_a_weight_gradient_before_its_backward_deadlocks() -> None:
    good = build_schedule(pipeline(2, 4, "zbv", 2), 2)
    first, second = good.actions
    weight = next(action for action in first if action.kind is Kind.WEIGHT)
    wrong = (weight, *(action for action in first if action != weight))
    with pytest.raises(ValueError, match=f"deadlocks at {weight}"):
        validate(Schedule(good.stage_rank, 2, (wrong, second)))


def test_zbv_keeps_the_order_that_the_plan_made_for_its_costs() -> None:
    costs = tuple((16, 20 + stage, 12) for stage in range(8))
    plain = pipeline(5, 8, "zbv", 2)
    schedule = build_schedule(plain.model_copy(update={"stage_costs": costs}), 4)
    orders = zbv_orders(4, 5, costs)
    assert [[(a.kind.value, a.stage, a.microbatch) for a in table] for table in schedule.actions] == [
        list(order) for order in orders
    ]
    assert schedule != build_schedule(plain, 4)
    with pytest.raises(UserInputError, match="stage_costs of 8 stages with zbv and pp 2"):
        build_schedule(pipeline(16, 4, "zbv", 2).model_copy(update={"stage_costs": costs}), 2)


def test_zbv_needs_two_chunks() -> None:
    with pytest.raises(UserInputError, match="zbv with 1 model chunks"):
        build_schedule(pipeline(4, 2, "zbv"), 2)


def test_without_pipeline_every_backward_follows_its_forward() -> None:
    schedule = build_schedule(pipeline(2, 1), 1)
    assert " ".join(map(str, schedule.actions[0])) == "0F0 0B0 0F1 0B1"


def test_a_deadlock_is_found() -> None:
    good = build_schedule(pipeline(2, 2), 2)
    first, second = good.actions
    waits_for_itself = Schedule(good.stage_rank, 2, ((first[-1], *first[:-1]), second))
    with pytest.raises(ValueError, match="deadlocks at 0B1, 1F0"):
        validate(waits_for_itself)


def test_a_missing_action_is_found() -> None:
    good = build_schedule(pipeline(2, 2), 2)
    with pytest.raises(ValueError, match="exactly once"):
        validate(Schedule(good.stage_rank, 2, (good.actions[0][:-1], good.actions[1])))


def test_messages_go_to_neighbours_in_the_senders_order() -> None:
    schedule = build_schedule(pipeline(4, 3), 3)
    found = channels(schedule, 1)
    assert set(found) == {(0, 1, Kind.FORWARD), (1, 2, Kind.FORWARD), (2, 1, Kind.BACKWARD), (1, 0, Kind.BACKWARD)}
    for messages in found.values():
        assert [message.made_by.microbatch for message in messages] == [0, 1, 2, 3]


def test_an_unknown_style_is_refused() -> None:
    with pytest.raises(UserInputError, match="no pipeline schedule 'gpipe'"):
        build_schedule(pipeline(4, 2, "gpipe"), 2)


def simulated_bubble(schedule: Schedule, seconds: float) -> float:
    """Idle part of a step in which every forward and each half of a backward pass takes as long."""
    ends: dict[Action, float] = {}
    clocks = [0.0] * len(schedule.actions)
    for action in run_order(schedule):
        rank = schedule.stage_rank[action.stage]
        start = max([clocks[rank], *(ends[needed] for needed in schedule.requires(action))])
        halves = 2 if action.kind is Kind.BACKWARD and not schedule.defers_weights else 1
        clocks[rank] = ends[action] = start + halves * seconds
    busy = 3 * seconds * schedule.num_microbatches * len(schedule.stages_of(0))
    return 1 - busy / max(clocks)


@pytest.mark.parametrize(("pp_size", "num_microbatches"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 16)])
@pytest.mark.parametrize(("style", "chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zbv", 2)])
def test_the_simulated_bubble_is_that_of_the_formula(
    style: str, chunks: int, pp_size: int, num_microbatches: int
) -> None:
    schedule = build_schedule(pipeline(num_microbatches, pp_size * chunks, style, chunks), pp_size)
    # Steps of the ramp over all steps; zbv's ramp steps are a third as long and of half a stage.
    work = {"1f1b": num_microbatches, "interleaved": chunks * num_microbatches, "zbv": 6 * num_microbatches}[style]
    ideal = (pp_size - 1) / (work + pp_size - 1)
    assert simulated_bubble(schedule, 1.0) == pytest.approx(ideal, rel=0.01)
