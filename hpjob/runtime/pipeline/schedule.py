"""Pipeline schedules: for every rank the ordered list of what it computes.

The orders are the planner's (:mod:`hpjob.plan.schedule`), so what it timed is what runs. A schedule is
a plain table that can be checked before any rank starts (:func:`validate`), printed and compared. Sends
and receives follow from it and are not part of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hpjob.core.errors import UserInputError
from hpjob.plan.model import Pipeline
from hpjob.plan.schedule import Op, interleaved, one_f_one_b
from hpjob.plan.schedule_zbv import zbv_orders


class Kind(StrEnum):
    """What an action computes for one microbatch on one stage."""

    FORWARD = "F"
    BACKWARD = "B"
    """All gradients, or where the table has ``WEIGHT`` those of the input."""
    WEIGHT = "W"


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a rank's table."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """All ranks' tables.

    Attributes:
        stage_rank: Pipeline rank of each stage.
        num_microbatches: Microbatches a step.
        actions: One table a pipeline rank.
    """

    stage_rank: tuple[int, ...]
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.stage_rank)

    @property
    def defers_weights(self) -> bool:
        """Whether weight gradients are actions of their own."""
        return any(action.kind is Kind.WEIGHT for action in self.actions[0])

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a pipeline rank, in model order."""
        return [stage for stage, owner in enumerate(self.stage_rank) if owner == rank]

    def requires(self, action: Action) -> list[Action]:
        """Return the actions whose results this one needs."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            return [Action(Kind.FORWARD, stage - 1, microbatch)] if stage else []
        if action.kind is Kind.WEIGHT:
            return [Action(Kind.BACKWARD, stage, microbatch)]
        needed = [Action(Kind.FORWARD, stage, microbatch)]
        if stage + 1 < self.num_stages:
            needed.append(Action(Kind.BACKWARD, stage + 1, microbatch))
        return needed


def _one_forward_one_backward(pipeline: Pipeline, pp_size: int) -> Schedule:
    count = pipeline.num_microbatches
    return _loop_schedule([one_f_one_b(pp_size, rank, count) for rank in range(pp_size)], 1, count)


def _interleaved(pipeline: Pipeline, pp_size: int) -> Schedule:
    chunks, count = pipeline.num_model_chunks, pipeline.num_microbatches
    if chunks < 2 or count % pp_size:
        raise UserInputError(
            f"interleaved with {chunks} model chunks, {count} microbatches and pp {pp_size}",
            hint="it needs at least two num_model_chunks and num_microbatches that divide by pp",
        )
    return _loop_schedule([interleaved(pp_size, rank, chunks, count) for rank in range(pp_size)], chunks, count)


def _loop_schedule(orders: Sequence[Sequence[Op]], chunks: int, num_microbatches: int) -> Schedule:
    """Return the schedule of the planner's orders, with stage s on pipeline rank s mod pp."""
    pp_size = len(orders)
    tables = tuple(
        tuple(Action(Kind(kind), chunk * pp_size + rank, microbatch) for kind, chunk, microbatch in order)
        for rank, order in enumerate(orders)
    )
    return Schedule(tuple(stage % pp_size for stage in range(pp_size * chunks)), num_microbatches, tables)


def _v_shaped(pipeline: Pipeline, pp_size: int) -> Schedule:
    chunks, count = pipeline.num_model_chunks, pipeline.num_microbatches
    if chunks != 2 or pp_size < 2:
        raise UserInputError(
            f"zbv with {chunks} model chunks and pp {pp_size}",
            hint="it needs two num_model_chunks and pp of at least 2",
        )
    costs = pipeline.stage_costs
    if costs is not None and len(costs) != 2 * pp_size:
        raise UserInputError(
            f"stage_costs of {len(costs)} stages with zbv and pp {pp_size}",
            hint="it needs those of all 2 pp stages",
        )
    tables = tuple(
        tuple(Action(Kind(kind), stage, microbatch) for kind, stage, microbatch in order)
        for order in zbv_orders(pp_size, count, costs)
    )
    return Schedule((*range(pp_size), *reversed(range(pp_size))), count, tables)


_BUILDERS: dict[str, Callable[[Pipeline, int], Schedule]] = {
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zbv": _v_shaped,
}
SCHEDULES = tuple(_BUILDERS)
"""Pipeline styles that the runtime has."""


def build_schedule(pipeline: Pipeline, pp_size: int) -> Schedule:
    """Return the checked schedule of a plan.

    Raises:
        UserInputError: The runtime has no such style, or the style does not fit the numbers.
    """
    if pp_size == 1 and pipeline.num_model_chunks == 1:
        return _one_forward_one_backward(pipeline, 1)
    if pipeline.style not in _BUILDERS:
        raise UserInputError(
            f"the runtime has no pipeline schedule {pipeline.style!r}", hint=f"use one of {', '.join(_BUILDERS)}"
        )
    schedule = _BUILDERS[pipeline.style](pipeline, pp_size)
    validate(schedule)
    return schedule


def forward_only(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Return tables of forward passes alone over the same stages, for any number of microbatches.

    A stage's n-th pass comes at time n + stage, so an order of time is one that all ranks can keep.
    """
    tables = []
    for rank in range(len(schedule.actions)):
        stages = schedule.stages_of(rank)
        table = [Action(Kind.FORWARD, stage, microbatch) for stage in stages for microbatch in range(num_microbatches)]
        tables.append(tuple(sorted(table, key=lambda action: (action.microbatch + action.stage, -action.stage))))
    return Schedule(schedule.stage_rank, num_microbatches, tuple(tables))


def validate(schedule: Schedule) -> None:
    """Check that every action is there once and that the tables run to their end.

    Raises:
        ValueError: Something is missing or doubled, or every rank waits for another.
    """
    seen = [action for table in schedule.actions for action in table]
    expected = {
        Action(kind, stage, microbatch)
        for kind in Kind
        if kind is not Kind.WEIGHT or schedule.defers_weights
        for stage in range(schedule.num_stages)
        for microbatch in range(schedule.num_microbatches)
    }
    if len(seen) != len(set(seen)) or set(seen) != expected:
        raise ValueError("a pipeline schedule must hold every action exactly once")
    for rank, table in enumerate(schedule.actions):
        if any(schedule.stage_rank[action.stage] != rank for action in table):
            raise ValueError(f"pipeline rank {rank} computes a stage that it does not hold")
    run_order(schedule)


def run_order(schedule: Schedule) -> list[Action]:
    """Return one order in which all ranks together can run their tables.

    Raises:
        ValueError: They deadlock.
    """
    done: dict[Action, None] = {}
    position = [0] * len(schedule.actions)
    progress = True
    while progress:
        progress = False
        for rank, table in enumerate(schedule.actions):
            while position[rank] < len(table) and all(a in done for a in schedule.requires(table[position[rank]])):
                done[table[position[rank]]] = None
                position[rank] += 1
                progress = True
    waiting = [str(table[p]) for table, p in zip(schedule.actions, position, strict=True) if p < len(table)]
    if waiting:
        raise ValueError(f"the pipeline schedule deadlocks at {', '.join(waiting)}")
    return list(done)


@dataclass(frozen=True, slots=True)
class Message:
    """One tensor that travels between pipeline ranks.

    Attributes:
        made_by: The action whose result it is; a FORWARD's is an activation, a BACKWARD's a gradient.
        source: Pipeline rank that sends.
        destination: Pipeline rank that receives.
    """

    made_by: Action
    source: int
    destination: int


Channel = tuple[int, int, Kind]
"""Source rank, destination rank, kind of the action that made the tensor."""


def message_of(schedule: Schedule, action: Action) -> Message | None:
    """Return the message that carries an action's result to another rank, if it must travel."""
    target = action.stage + (1 if action.kind is Kind.FORWARD else -1)
    if action.kind is Kind.WEIGHT or not 0 <= target < schedule.num_stages:
        return None
    source, destination = schedule.stage_rank[action.stage], schedule.stage_rank[target]
    return None if source == destination else Message(action, source, destination)


def channels(schedule: Schedule, rank: int) -> dict[Channel, Sequence[Message]]:
    """Return the messages of every channel that a rank sends or receives on, in the sender's order.

    Both ends know the sender's order from the table, so a receiver can post its receives in that order
    even when it uses the tensors in another one; transports without tags need that.
    """
    result: dict[Channel, list[Message]] = defaultdict(list)
    for table in schedule.actions:
        for action in table:
            message = message_of(schedule, action)
            if message and rank in (message.source, message.destination):
                result[message.source, message.destination, action.kind].append(message)
    return dict(result)
