"""Predictions for rows: step time and memory of the fastest layout that their fields allow."""

from __future__ import annotations

from dataclasses import dataclass

from hpjob.plan.constants import Calibration
from hpjob.plan.hardware import hardware_of
from hpjob.plan.memory import GIB, MemoryModel, RankBytes
from hpjob.plan.published.rows import Case
from hpjob.plan.step_time import StepModel

SAFE_FRACTION = 0.86
"""Of a GPU's memory that a run may be estimated to need: above it the run is expected to fail.

The estimate is a static one; runs of frameworks whose memory was published scatter around it with a standard
deviation of 6.4 %, and 2.5 of them must fit. Written down while all families were in view."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the planner says of a row."""

    step_s: float
    memory: RankBytes
    device_gib: float

    @property
    def fits(self) -> bool:
        """The run survives the estimate's error, too."""
        return self.memory.total / GIB <= SAFE_FRACTION * self.device_gib


def predict(case: Case, fit: Calibration | None = None) -> Prediction:
    """Price a row; unknown fields take the fastest value that fits."""
    model = StepModel(case.shape, hardware_of(case.machine, case.machine.gpus_per_node, fit), case.habits)
    memory_model = MemoryModel(case.shape, case.habits)
    options = []
    for layout in case.layouts:
        memory = memory_model.worst(layout)
        rough = model.step(layout, simulate=False).step / layout.global_batch if len(case.layouts) > 1 else 0.0
        fits = memory.total / GIB <= case.machine.gpu_memory_gib
        options.append((not fits, rough if fits else memory.total, layout, memory))
    _, _, layout, memory = min(options, key=lambda option: option[:2])
    step = model.step(layout).step * case.global_batch / layout.global_batch
    return Prediction(step, memory, case.machine.gpu_memory_gib)
