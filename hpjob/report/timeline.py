"""A run's attempts as one story: when each waited, ran and ended, why, and which share of the time was training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpjob.core.run_records import read_json_lines
from hpjob.report.read import Attempt, RunRecord, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptSummary:
    """One attempt in a line."""

    index: int
    job_id: str
    nodes: tuple[str, ...]
    queued_s: float | None
    """Waited before its start; None = not known when it began to wait."""
    started_at: float
    ended_at: float | None
    """None = it runs."""
    first_step: int | None
    last_step: int | None
    """Of the steps that it did and that counted."""
    steps_again: int
    """Steps that the attempts before had done and that it had to do again."""
    why: str
    """Why it ended, or that it runs."""
    left_out: tuple[str, ...]
    """Nodes that the next attempt was not to get."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accounting:
    """Where the time went."""

    wall_s: float
    """From the first submission to the end, or until now."""
    queued_s: float
    held_s: float
    """Time in which nodes were held."""
    step_s: float
    """Time in steps that counted."""
    steps_lost: int
    """Steps that were done more than once."""

    @property
    def goodput(self) -> float | None:
        """Share of the time on nodes that was spent in steps that counted."""
        return min(1.0, self.step_s / self.held_s) if self.held_s > 0 else None

    @property
    def goodput_of_wall(self) -> float | None:
        """The same with the time in the queue."""
        return min(1.0, self.step_s / self.wall_s) if self.wall_s > 0 else None


def summaries(record: RunRecord, *, live: bool, now: float) -> list[AttemptSummary]:
    """Return the attempts, oldest first.

    Args:
        record: The run.
        live: Whether its job still runs.
        now: Seconds since the epoch.
    """
    submitted = _submitted(record)
    by_attempt: dict[int, list[Step]] = {}
    for step in record.steps:
        if step.attempt is not None:
            by_attempt.setdefault(step.attempt, []).append(step)
    found: list[AttemptSummary] = []
    free_since: float | None = None
    for position, attempt in enumerate(record.attempts):
        last = position == len(record.attempts) - 1
        steps = by_attempt.get(attempt.files.index, [])
        runs = last and live and attempt.ended_at is None
        following = None if last else record.attempts[position + 1].started_at
        ended_at = None if runs else _ended_at(attempt, steps, following)
        since = [time for time in (free_since, submitted.get(attempt.job_id)) if time is not None]
        found.append(
            AttemptSummary(
                index=attempt.files.index,
                job_id=attempt.job_id,
                nodes=attempt.hostnames,
                queued_s=max(0.0, attempt.started_at - max(since)) if since else None,
                started_at=attempt.started_at,
                ended_at=ended_at,
                first_step=steps[0].step if steps else None,
                last_step=steps[-1].step if steps else None,
                steps_again=attempt.steps_again,
                why="runs" if runs else why_ended(attempt),
                left_out=attempt.left_out,
            )
        )
        free_since = now if ended_at is None else ended_at
    return found


def accounting(record: RunRecord, attempts: list[AttemptSummary], *, now: float) -> Accounting:
    """Add up where the time went."""
    ends = [now if attempt.ended_at is None else attempt.ended_at for attempt in attempts]
    submitted = _submitted(record)
    begins = [*submitted.values(), *(attempt.started_at for attempt in attempts)]
    return Accounting(
        wall_s=max(0.0, max(ends) - min(begins)) if ends else 0.0,
        queued_s=sum(attempt.queued_s or 0.0 for attempt in attempts),
        held_s=sum(max(0.0, end - attempt.started_at) for end, attempt in zip(ends, attempts, strict=True)),
        step_s=sum(step.step_time_s for step in record.steps),
        steps_lost=sum(attempt.steps_again for attempt in attempts),
    )


def why_ended(attempt: Attempt) -> str:
    """Return in one line why an attempt ended."""
    failure, outcome = attempt.first_failure, attempt.outcome
    if outcome is not None and outcome.kind == "finished":
        return "finished"
    if failure is not None and failure.kind != "peer-lost":
        message = failure.message.strip().splitlines()[0] if failure.message.strip() else failure.kind
        named = message if f"rank {failure.rank}" in message else f"rank {failure.rank} on {failure.node}: {message}"
        return f"{failure.kind}: {named}"
    if outcome is not None and outcome.kind == "preempted":
        return f"saved at step {outcome.step} ({outcome.reason})"
    if attempt.reason:
        return attempt.reason
    if failure is not None:
        return failure.message.strip().splitlines()[0] if failure.message.strip() else failure.kind
    return "ended without a word: its nodes or its job were gone"


def _ended_at(attempt: Attempt, steps: list[Step], following: float | None) -> float:
    """Return when an attempt ended; without a word of its own, at its last sign of life."""
    if attempt.ended_at is not None:
        return attempt.ended_at
    seen = [attempt.started_at, *(step.time for step in steps), *(failure.time for failure in attempt.failures)]
    if attempt.last_event_at is not None:
        seen.append(attempt.last_event_at)
    return min(max(seen), following) if following is not None else max(seen)


def _submitted(record: RunRecord) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for line in read_json_lines(record.files.jobs):
        if "job_id" in line and isinstance(line.get("submitted_at"), int | float):
            found.setdefault(str(line["job_id"]), float(line["submitted_at"]))
    return found
