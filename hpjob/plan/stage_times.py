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


def hop_times(hop: float | Sequence[float], style: str, pp: int, num_stages: int) -> tuple[float, ...]:
    """Return the seconds from every stage to the next one.

    Args:
        hop: One for all, or of every stage but the last. Nothing is sent at the turn of ``zbv``, inside one rank.
        style: ``1f1b``, ``interleaved`` or ``zbv``.
        pp: Pipeline ranks.
        num_stages: Stages of all ranks.
    """
    found = (hop,) * (num_stages - 1) if isinstance(hop, float | int) else tuple(hop)
    return tuple(0.0 if style == "zbv" and stage == pp - 1 else seconds for stage, seconds in enumerate(found))
