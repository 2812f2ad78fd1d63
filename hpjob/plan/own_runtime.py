"""How the runtime of this project is priced: it compiles layers where it can, and works eagerly elsewhere."""

from __future__ import annotations

from functools import cached_property

from hpjob.plan.constants import framework
from hpjob.plan.hardware import Hardware
from hpjob.plan.layout import Layout
from hpjob.plan.memory import GIB, MemoryModel, RankBytes
from hpjob.plan.model import MemoryEstimate
from hpjob.plan.shape import Shape
from hpjob.plan.step_time import StepModel, StepTime


class OwnRuntime:
    """Prices layouts of one model on one kind of hardware; it keeps what they share.

    Args:
        shape: Sizes of the model.
        hardware: Kind of node.
        compiles: Layers are compiled where the layout allows it.
    """

    def __init__(self, shape: Shape, hardware: Hardware, *, compiles: bool = True) -> None:
        self.shape = shape
        self.hardware = hardware
        self._compiles = compiles and not hardware.is_cpu and not shape.num_experts

    @cached_property
    def _compiled(self) -> tuple[StepModel, MemoryModel]:
        habits = framework("hpjob")
        return (
            StepModel(self.shape, self.hardware, habits),
            MemoryModel(self.shape, habits, is_cpu=self.hardware.is_cpu),
        )

    @cached_property
    def _eager(self) -> tuple[StepModel, MemoryModel]:
        habits = framework("hpjob eager")
        return (
            StepModel(self.shape, self.hardware, habits),
            MemoryModel(self.shape, habits, is_cpu=self.hardware.is_cpu),
        )

    def compiles(self, layout: Layout) -> bool:
        """Whether whole layers run compiled: products in parts cannot be traced."""
        return self._compiles and layout.sequence_mode != "ring"

    def time_model(self, layout: Layout) -> StepModel:
        """Return the model that prices the time of a layout."""
        return (self._compiled if self.compiles(layout) else self._eager)[0]

    def memory_model(self, layout: Layout) -> MemoryModel:
        """Return the model that prices the memory of a layout."""
        return (self._compiled if self.compiles(layout) else self._eager)[1]

    def step(self, layout: Layout, *, simulate: bool = True) -> StepTime:
        """Price a step; without ``simulate`` the bubble comes from a formula."""
        return self.time_model(layout).step(layout, simulate=simulate)

    def least_step(self, layout: Layout) -> float:
        """Return seconds that a step takes at least."""
        return self.time_model(layout).least(layout)

    def rank_bytes(self, layout: Layout, pp_rank: int) -> RankBytes:
        """Return the bytes of the ranks of one pipeline stage by kind."""
        return self.memory_model(layout).rank(layout, pp_rank)

    def rank_memory(self, layout: Layout, pp_rank: int) -> MemoryEstimate:
        """Return the peak memory of the ranks of one pipeline stage, rounded."""
        b = self.rank_bytes(layout, pp_rank)
        return MemoryEstimate(
            pp_rank=pp_rank,
            weights_gib=round(b.weights / GIB, 3),
            gradients_gib=round(b.gradients / GIB, 3),
            optimizer_gib=round(b.optimizer / GIB, 3),
            activations_gib=round(b.activations / GIB, 3),
            logits_gib=round(b.logits / GIB, 3),
            workspace_gib=round(b.reserve / GIB, 3),
        )

    def worst_gib(self, layout: Layout) -> float:
        """Return what the fullest rank needs."""
        return self.memory_model(layout).worst(layout).total / GIB
