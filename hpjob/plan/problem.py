"""What is to be laid out, and on what."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hpjob.plan.hardware import Hardware
from hpjob.plan.own_runtime import OwnRuntime
from hpjob.plan.shape import Shape
from hpjob.recipe.model import ParallelSettings


@dataclass(frozen=True)
class Problem:
    """A model, its fixed settings and the GPUs it may use."""

    shape: Shape
    settings: ParallelSettings
    seq: int
    global_batch: int
    world_size: int
    hardware: Hardware
    basis: Literal["estimated", "rehearsed", "measured"] = "estimated"
    basis_words: str = ""
    """Which constants come from which site file."""

    @cached_property
    def runtime(self) -> OwnRuntime:
        """Prices memory and step times; it keeps what candidates share."""
        return OwnRuntime(self.shape, self.hardware, compiles=self.settings.enable_jit_fused is not False)
