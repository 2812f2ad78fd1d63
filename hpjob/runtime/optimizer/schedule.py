"""The learning rate as a pure function of the step, so a resumed run needs no scheduler state."""

from __future__ import annotations

from math import cos, pi

from hpjob.recipe.model import OptimizerSettings


def learning_rate(settings: OptimizerSettings, step: int, total_steps: int) -> float:
    """Return the rate of a 1-based step.

    It rises linearly to ``lr`` at step ``warmup_steps``, then falls to ``min_lr_ratio * lr`` at the
    last step, along a cosine or a line, or stays.
    """
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    span = max(total_steps - settings.warmup_steps, 1)
    progress = min((step - settings.warmup_steps) / span, 1.0)
    remaining = 0.5 * (1.0 + cos(pi * progress)) if settings.schedule == "cosine" else 1.0 - progress
    low = settings.min_lr_ratio
    return settings.lr * (low + (1.0 - low) * remaining)
