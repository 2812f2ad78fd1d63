"""Seconds of one microbatch in every stage of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageTimes:
    """In model order; schedules without a split backward pass run its two parts as one."""

    forward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
