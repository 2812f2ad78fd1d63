"""How long before its end a job has to be told to save."""

from __future__ import annotations

import math
from statistics import quantiles

from hpjob.core.run_dir import RunDir
from hpjob.core.run_records import read_json_lines
from hpjob.plan.model import Plan
from hpjob.recipe.model import Recipe

# Rate at which one node writes its part of a checkpoint to shared storage, until a save was measured.
# One GiB/s is a slow parallel file system: the lead errs on the long side.
ASSUMED_SAVE_GIB_S = 1.0
REQUEUE_CALL_S = 60
SAFETY_S = 60

# Checkpoints against a kill without warning: no closer than this, and training goes on while one is written.
LEAST_INTERVAL_S = 60.0
SAVES_APART = 3.0


def expected_save_s(plan: Plan) -> float:
    """Return how long the first save will take: the largest node's weights and optimizer states, written slowly."""
    per_rank = max(entry.weights_gib + entry.optimizer_gib for entry in plan.memory)
    return per_rank * plan.gpus_per_node / ASSUMED_SAVE_GIB_S


def measured_step_s(run: RunDir) -> float | None:
    """Return a slow step (95th percentile) of what the run has trained so far, None without enough steps."""
    times = [float(line["step_time_s"]) for line in read_json_lines(run.metrics) if line.get("step_time_s")]
    return quantiles(times, n=20)[-1] if len(times) >= 10 else None


def measured_save_s(run: RunDir) -> float | None:
    """Return the longest save that the run has seen, None before the first."""
    events = (event for attempt in run.attempt_list() for event in read_json_lines(attempt.events))
    saves = (event for event in events if event.get("event") == "checkpoint-saved")
    return max((float(event["duration_s"]) for event in saves if event.get("duration_s")), default=None)


def stop_s(step_s: float, save_s: float) -> float:
    """Return how long the ranks may take to stop: the step that runs, a save that has just begun, one of their own."""
    return step_s + 2 * save_s


def signal_lead_s(step_s: float, save_s: float) -> int:
    """Return the seconds before the end at which the ranks are told: their stop, the requeue, and safety."""
    return math.ceil(stop_s(step_s, save_s) + REQUEUE_CALL_S + SAFETY_S)


def bound_loss(recipe: Recipe, *, step_s: float, save_s: float) -> tuple[Recipe, str]:
    """Make sure that little is lost when there is no time for a save at the end.

    Returns:
        The recipe, with checkpoints that are kept only until the next one where it had none or they were rarer
        than useful, and what follows in words.
    """
    settings = recipe.checkpoint
    interval = max(1, math.ceil(max(LEAST_INTERVAL_S, SAVES_APART * save_s) / step_s))
    every = min(interval, settings.every_steps, settings.ephemeral_every_steps or settings.every_steps)
    lost_s = every * step_s + save_s
    words = f"at most the work of {every} steps (about {lost_s:.0f} s) is lost"
    if every < min(settings.every_steps, settings.ephemeral_every_steps or settings.every_steps):
        checkpoint = settings.model_copy(update={"ephemeral_every_steps": every})
        return recipe.model_copy(update={"checkpoint": checkpoint}), (
            f"an ephemeral checkpoint is written every {every} steps, so {words} (checkpoint.ephemeral_every_steps)"
        )
    return recipe, words
