"""One way to spread a model over GPUs: what the search enumerates and the cost models price."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from hpjob.recipe.model import PipelineStyle, Precision, RecomputePolicy, SequenceParallelismMode


class Layout(NamedTuple):
    """Degrees, schedule and policies of a run; see :class:`hpjob.plan.model.Plan` for the persisted form."""

    tp: int
    pp: int
    dp: int
    num_microbatches: int
    microbatch: int
    seq: int
    sp: int = 1
    ep: int = 1
    sequence_mode: SequenceParallelismMode | None = None
    """``split_gather`` and ``ring`` shard over tp (``sp`` stays 1); the others use the sp axis."""
    tp_sharded: bool = False
    """Other frameworks combine a sequence axis with activations sharded over tp."""
    zero: Literal[0, 1, 2, 3] = 1
    zero_shard: int | None = None
    """Data-parallel ranks that hold the state once together; None = all of them."""
    style: PipelineStyle = "1f1b"
    chunks: int = 1
    relief: int = 0
    """Layers that the last stage gives to the others because the head and the loss are its own."""
    recompute: RecomputePolicy = "none"
    every_kth: int = 1
    precision: Precision = "bf16"
    cpu_offload: bool = False
    flash: bool = True
    """Attention keeps no score matrix in memory."""
    fp8: bool = False
    """Linear layers multiply in 8-bit numbers."""

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.sp * self.tp

    @property
    def data_ranks(self) -> int:
        """Ranks that share parameters beside the TP group."""
        return self.dp * self.sp

    @property
    def state_shards(self) -> int:
        """Ranks over which ZeRO shards; other groups of as many have copies."""
        return self.zero_shard or self.data_ranks

    @property
    def global_batch(self) -> int:
        return self.dp * self.num_microbatches * self.microbatch

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one rank, before tensor parallelism."""
        return self.microbatch * self.seq // self.sp

    @property
    def sharded_norms(self) -> bool:
        """Activations between the TP regions are split over tp."""
        return self.tp_sharded or self.sequence_mode in ("split_gather", "ring")

    @property
    def element_bytes(self) -> int:
        return 4 if self.precision == "fp32" else 2


@lru_cache(maxsize=4096)
def split_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Spread layers over stages as evenly as possible, in model order.

    Stages that also hold the embedding or the head get one layer less when layers do not divide.

    Raises:
        ValueError: Fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ValueError(f"{num_layers} layers are fewer than {num_stages} stages")
    base, extra = divmod(num_layers, num_stages)
    # The last stage (head and loss) gives way first, then the first (embedding).
    order = sorted(range(num_stages), key=lambda stage: (stage == num_stages - 1, stage == 0, stage))
    sizes = [base] * num_stages
    for stage in order[:extra]:
        sizes[stage] += 1
    return tuple(sizes)


@lru_cache(maxsize=4096)
def relieved_split(num_layers: int, num_stages: int, relief: int) -> tuple[int, ...]:
    """Split layers with ``relief`` fewer in the last stage than an even split gives it.

    Raises:
        ValueError: A stage would be left without a layer.
    """
    even = split_layers(num_layers, num_stages)
    if not relief:
        return even
    last = even[-1] - relief
    if num_stages < 2 or last < 1:
        raise ValueError(f"{num_layers} layers over {num_stages} stages leave {relief} fewer for the last none")
    return (*split_layers(num_layers - last, num_stages - 1), last)


def stage_layers(num_layers: int, layout: Layout) -> tuple[int, ...]:
    """Return the decoder layers of each stage of a layout, in model order."""
    return relieved_split(num_layers, layout.pp * layout.chunks, layout.relief)


def stages_of_rank(pp_rank: int, pp: int, chunks: int, style: PipelineStyle) -> tuple[int, ...]:
    """Return the stages (in model order) that a pipeline rank holds.

    Interleaved chunks go round the ranks; the two chunks of ``zbv`` go down and come back up.
    """
    if style == "zbv":
        return (pp_rank, 2 * pp - 1 - pp_rank)
    return tuple(pp_rank + chunk * pp for chunk in range(chunks))
