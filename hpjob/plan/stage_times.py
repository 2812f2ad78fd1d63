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


def between_stages(style: str, pp: int, num_stages: int, hops: float | Sequence[float]) -> list[float]:
    """Return the seconds from every stage to the next; 0 where one rank has both.

    Args:
        style: ``1f1b``, ``interleaved`` or ``zbv``.
        pp: Pipeline ranks.
        num_stages: Stages of all ranks.
        hops: From each pipeline rank to the next, from the last to the first at the end; one number = all of them.
    """
    of_rank = [float(hops)] * pp if isinstance(hops, int | float) else list(hops)
    if style == "zbv":
        return [*of_rank[: pp - 1], 0.0, *reversed(of_rank[: pp - 1])]
    return [of_rank[stage % pp] for stage in range(num_stages - 1)]
