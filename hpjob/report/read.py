"""A run folder -> frozen records: metrics, attempts, failures, progress.

Reads files only, so it works for a running, finished or crashed run, on any machine that sees the folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from hpjob.core.errors import HpjobError
from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import (
    Failure,
    Outcome,
    first_failure,
    newest_checkpoint_step,
    read_failures,
    read_json,
    read_json_lines,
    read_outcome,
)
from hpjob.core.schema import parse
from hpjob.plan.model import Plan

# Steps over which speed and time left are judged: long enough to even out, short enough to follow a change.
_RECENT_STEPS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One line of ``metrics.jsonl``."""

    step: int
    loss: float
    grad_norm: float | None
    lr: float | None
    tokens: int
    tokens_per_s: float
    step_time_s: float
    attempt: int | None
    time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One start of the run."""

    files: AttemptDir
    job_id: str
    executor: str
    restart_count: int
    started_at: float
    hostnames: tuple[str, ...]
    world_size: int
    outcome: Outcome | None
    """What rank 0 said; None = it had no time to say anything, or still runs."""
    decision: str | None
    """``requeue``, ``done`` or ``stop``; None = the launcher did not get so far."""
    reason: str
    ended_at: float | None
    failures: tuple[Failure, ...]
    phase: str | None
    """Newest event, such as ``building`` or ``training``."""
    save_problem: str | None
    """Why the newest save failed; None once a later one came through."""
    steps_again: int = 0
    """Steps of earlier attempts that it did again, because they were not in a checkpoint."""
    left_out: tuple[str, ...] = ()
    """Nodes that the next attempt was not to get."""
    last_event_at: float | None = None
    loss_faults: int = 0
    """Steps whose loss was no number or far above the usual."""

    @property
    def first_failure(self) -> Failure | None:
        return first_failure(self.failures)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What a run folder holds."""

    files: RunDir
    recipe: str
    total_steps: int | None
    plan: Plan | None
    steps: tuple[Step, ...]
    attempts: tuple[Attempt, ...]
    checkpoint_step: int
    """Newest complete checkpoint, 0 = none."""
    finished: bool
    cancelled: bool
    damaged: tuple[AttemptDir, ...] = ()
    """Attempts whose own record cannot be read; ``attempts`` lacks them."""

    @property
    def newest_is_damaged(self) -> bool:
        """Whether what is known of the last attempt is not of the newest one."""
        if not self.damaged:
            return False
        return not self.attempts or self.damaged[-1].index > self.attempts[-1].files.index

    @property
    def last_step(self) -> Step | None:
        return self.steps[-1] if self.steps else None

    @property
    def last_attempt(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def tokens_per_s(self) -> float | None:
        """Median over the newest steps."""
        recent = self.steps[-_RECENT_STEPS:]
        return median(step.tokens_per_s for step in recent) if recent else None

    @property
    def seconds_left(self) -> float | None:
        """Time for the steps that are missing at the newest speed; None when it is not known."""
        recent = self.steps[-_RECENT_STEPS:]
        if not recent or self.total_steps is None:
            return None
        return max(0, self.total_steps - recent[-1].step) * median(step.step_time_s for step in recent)


def read_run(path: Path) -> RunRecord:
    """Read a run folder; what is missing or damaged is left out."""
    run = RunDir(path)
    recipe = _read_yaml(run.recipe)
    training = recipe.get("training")
    steps = training.get("steps") if isinstance(training, dict) else None
    attempts = [(files, _attempt(files)) for files in run.attempt_list()]
    return RunRecord(
        files=run,
        recipe=str(recipe.get("name") or "?"),
        total_steps=steps if isinstance(steps, int) else None,
        plan=_read_plan(run.plan),
        steps=tuple(step for line in read_json_lines(run.metrics) if (step := _step(line)) is not None),
        attempts=tuple(attempt for _, attempt in attempts if attempt is not None),
        checkpoint_step=newest_checkpoint_step(run),
        finished=run.finished.exists(),
        cancelled=run.cancelled.exists(),
        damaged=tuple(files for files, attempt in attempts if attempt is None and files.attempt_json.exists()),
    )


def _step(line: dict[str, Any]) -> Step | None:
    try:
        return Step(
            step=int(line["step"]),
            loss=float(line["loss"]),
            grad_norm=line.get("grad_norm"),
            lr=line.get("lr"),
            tokens=int(line.get("tokens", 0)),
            tokens_per_s=float(line.get("tokens_per_s", 0.0)),
            step_time_s=float(line.get("step_time_s", 0.0)),
            attempt=line.get("attempt"),
            time=float(line.get("time", 0.0)),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _attempt(files: AttemptDir) -> Attempt | None:
    document = read_json(files.attempt_json)
    if document is None:
        return None
    try:
        return _read_attempt(files, document)
    except (TypeError, ValueError):  # values of another type than ever written
        return None


def _read_attempt(files: AttemptDir, document: dict[str, Any]) -> Attempt:
    end = read_json(files.end) or {}
    events = read_json_lines(files.events)
    return Attempt(
        files=files,
        job_id=str(document.get("job_id", "?")),
        executor=str(document.get("executor", "?")),
        restart_count=int(document.get("restart_count") or 0),
        started_at=float(document.get("started_at") or 0.0),
        hostnames=tuple(document.get("hostnames") or ()),
        world_size=int(document.get("world_size") or 0),
        outcome=read_outcome(files),
        decision=end.get("decision"),
        reason=str(end.get("reason") or ""),
        ended_at=None if end.get("time") is None else float(end["time"]),
        failures=tuple(read_failures(files)),
        phase=str(events[-1]["event"]) if events and "event" in events[-1] else None,
        save_problem=_save_problem(events),
        steps_again=sum(int(event.get("steps_again") or 0) for event in events if event.get("event") == "training"),
        left_out=tuple(end.get("left_out") or ()),
        last_event_at=next((float(event["time"]) for event in reversed(events) if "time" in event), None),
        loss_faults=sum(event.get("event") == "loss-fault" for event in events),
    )


def _save_problem(events: list[dict[str, Any]]) -> str | None:
    saves = [event for event in events if event.get("event") in {"checkpoint-saved", "checkpoint-failed"}]
    if not saves or saves[-1]["event"] == "checkpoint-saved":
        return None
    return f"the save of step {saves[-1].get('step', '?')} failed: {saves[-1].get('reason') or 'no reason given'}"


def _read_plan(path: Path) -> Plan | None:
    document = read_json(path)
    if document is None:
        return None
    try:
        return parse(Plan, document, source=str(path))
    except HpjobError:  # a plan of another version is no reason to show nothing
        return None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return document if isinstance(document, dict) else {}
