"""What one rank of a plan measured when it ran alone on one device."""

from __future__ import annotations

from typing import Literal

from hpjob.core.schema import Persisted


class StageTiming(Persisted):
    """Median seconds of one microbatch on one stage, without any communication."""

    stage: int
    num_layers: int
    forward_s: float
    backward_s: float
    """All gradients, or where the schedule defers those of weights, the input's."""
    weight_s: float | None = None
    """Deferred weight gradients; None = part of ``backward_s``."""


class RankRehearsal(Persisted):
    """One rank: its memory by kind and the time of its own work.

    ``peak_gib`` is everything that tensors held at once; with weights, gradients and optimizer taken away it leaves
    activations, logits and what kernels need beside them.
    """

    version: Literal[1] = 1
    plan_summary: str
    rank: int
    pp_rank: int
    world_size: int
    device: str
    weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    peak_gib: float
    reserved_gib: float | None = None
    """What the device's allocator took; None = not a GPU."""
    stages: tuple[StageTiming, ...]
    optimizer_s: float
    host_s: float
    """From the call of a step until all its work was handed to the device."""
    num_microbatches: int
    """Of the rehearsed step; a plan with many runs only as many as fill its pipeline twice."""

    @property
    def working_gib(self) -> float:
        """The peak without weights, gradients and optimizer state."""
        return max(0.0, self.peak_gib - self.weights_gib - self.gradients_gib - self.optimizer_gib)
