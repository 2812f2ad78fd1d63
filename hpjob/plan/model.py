"""The plan: how a model is spread over a topology, and why.

Mesh axes, outermost first: ``pp, dp, sp, tp``. Rank r has the coordinates of the row-major index
``((pp * dp_size + dp) * sp_size + sp) * tp_size + tp``; which node and GPU carries rank r is the
placement's business.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from hpjob.core.schema import Persisted
from hpjob.recipe.model import PipelineStyle, Precision, RecomputePolicy, SequenceParallelismMode

PositiveInt = Annotated[int, Field(gt=0)]


class Axis(StrEnum):
    """Mesh axes in their order, outermost first. Used by planner, mesh, logs and pictures."""

    PP = "pp"
    DP = "dp"
    SP = "sp"
    TP = "tp"


class ParallelDegrees(Persisted):
    """Size of each axis; their product (without ``ep``, which re-divides dp·sp) is the world."""

    pp: PositiveInt = 1
    dp: PositiveInt = 1
    sp: PositiveInt = 1
    tp: PositiveInt = 1
    ep: PositiveInt = 1

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.sp * self.tp

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Return the position of a rank on each axis."""
        rest, tp = divmod(rank, self.tp)
        rest, sp = divmod(rest, self.sp)
        pp, dp = divmod(rest, self.dp)
        return {Axis.PP: pp, Axis.DP: dp, Axis.SP: sp, Axis.TP: tp}


class RankPlace(Persisted):
    """Where one rank runs."""

    rank: int
    node: int
    """Index into the topology's node order."""
    gpu: int


class Pipeline(Persisted):
    """Schedule and split of the layers."""

    style: PipelineStyle = "1f1b"
    num_model_chunks: PositiveInt = 1
    """Model chunks (virtual stages) per pipeline rank."""
    num_microbatches: PositiveInt
    microbatch_size: PositiveInt
    layers_per_stage: tuple[int, ...]
    """Decoder layers of each of the pp · num_model_chunks stages, in model order."""
    stage_costs: tuple[tuple[PositiveInt, PositiveInt, PositiveInt], ...] | None = None
    """Relative times of forward, input and weight gradients of each stage that the order of ``zbv`` is made for;
    None = all are equal, or another style."""


class MemoryEstimate(Persisted):
    """Bytes of one rank by kind, in GiB."""

    pp_rank: int
    weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float
    logits_gib: float
    workspace_gib: float

    @property
    def total_gib(self) -> float:
        return (
            self.weights_gib
            + self.gradients_gib
            + self.optimizer_gib
            + self.activations_gib
            + self.logits_gib
            + self.workspace_gib
        )


class TimeEstimate(Persisted):
    """Seconds of one optimizer step by kind."""

    step_s: float
    compute_s: float
    bubble_s: float
    tp_comm_s: float
    pp_comm_s: float
    dp_comm_s: float
    optimizer_s: float
    tokens_per_s: float
    low_s: float
    high_s: float


class RunnerUp(Persisted):
    """A plan that was not chosen, in short."""

    summary: str
    """Such as ``tp 8 · pp 2 · dp 2, zero 1, 1f1b, 16 x 1``."""
    step_s: float | None
    """None = ruled out before timing."""
    memory_gib: float | None
    why_not: str
    lost_s: dict[str, float] = Field(default_factory=dict)
    """Seconds that it spends more than the plan, by kind."""


class Change(Persisted):
    """What one change would bring, computed like a plan."""

    change: str
    """Such as ``8 nodes`` or ``5.2 GiB more a GPU``."""
    summary: str
    """The layout that would be used, or why there is none."""
    step_s: float | None = None
    """None = there is no plan."""
    memory_gib: float | None = None
    percent: float | None = None
    """Longer (+) or shorter (-) step."""


class Plan(Persisted):
    """Everything the runtime needs to know about the layout, and why it was chosen."""

    version: Literal[1] = 1
    recipe: str
    model_type: str = "llama"
    machine: str
    num_nodes: PositiveInt
    gpus_per_node: PositiveInt
    degrees: ParallelDegrees
    zero_stage: Literal[0, 1, 2, 3]
    zero_shard_size: PositiveInt | None = None
    """Neighbouring dp·sp ranks over which each copy of the state is sharded; None = all of them, one copy."""
    sequence_parallelism_mode: SequenceParallelismMode | None = None
    pipeline: Pipeline
    recompute: RecomputePolicy = "none"
    recompute_every_kth_layer: PositiveInt = 1
    recompute_layers_per_stage: tuple[int, ...] | None = None
    """First layers of each stage that are recomputed, where these are given; None = every k-th."""
    precision: Precision
    cpu_offload: bool = False
    global_batch_size: PositiveInt
    """Sequences a step: dp · num_microbatches · microbatch_size."""
    seq_length: PositiveInt
    placement: tuple[RankPlace, ...]
    memory: tuple[MemoryEstimate, ...]
    """One entry a pipeline rank."""
    memory_limit_gib: float
    time: TimeEstimate
    reasons: tuple[str, ...]
    binding: str = ""
    """What keeps the step from being shorter."""
    runners_up: tuple[RunnerUp, ...] = ()
    changes: tuple[Change, ...] = ()
    basis: Literal["estimated", "rehearsed", "measured"] = "estimated"
    """Where the constants come from: packaged ones, or those of a site file."""
    basis_note: str = ""
    """What the interval of the step time means, and which site file was read."""
    warnings: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One line such as ``tp 4 · pp 4 · dp 2, zero 1, interleaved x2, 8 microbatches of 1, bf16``."""
        d = self.degrees
        axes = [f"tp {d.tp}", f"pp {d.pp}", f"dp {d.dp}"]
        axes += [f"sp {d.sp} {self.sequence_parallelism_mode}"] if d.sp > 1 else []
        axes += [f"ep {d.ep}"] if d.ep > 1 else []
        style = self.pipeline.style
        chunks = f" x{self.pipeline.num_model_chunks}" if self.pipeline.num_model_chunks > 1 else ""
        schedule = f", {style}{chunks}" if d.pp > 1 else ""
        batches = f", {self.pipeline.num_microbatches} microbatches of {self.pipeline.microbatch_size}"
        groups = f" in groups of {self.zero_shard_size}" if self.zero_shard_size else ""
        return f"{' · '.join(axes)}, zero {self.zero_stage}{groups}{schedule}{batches}, {self.precision}"
