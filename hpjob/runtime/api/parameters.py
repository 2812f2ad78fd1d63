"""The parameters of :class:`HybridParallelPlugin`: names and defaults, and what each of them means here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from hpjob.core.schema import Persisted
from hpjob.recipe.model import PipelineStyle, PositiveInt, Precision, SequenceParallelismMode

_Count = Annotated[int, Field(gt=0, strict=True)]


class PluginParameters(Persisted):
    """Every parameter by its name; ``docs/api.md`` has them in a table."""

    tp_size: PositiveInt
    pp_size: PositiveInt
    sp_size: PositiveInt | None = None
    ep_size: PositiveInt = 1
    precision: Precision = "fp16"
    use_fp8: bool = False
    zero_stage: Literal[0, 1, 2, 3] = 0
    zero_shard_size: PositiveInt | None = None
    cpu_offload: bool = False
    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    enable_jit_fused: bool = False
    enable_sequence_parallelism: bool = False
    sequence_parallelism_mode: SequenceParallelismMode | None = None
    inner_ring_size: PositiveInt | None = None
    parallel_output: bool = True
    num_microbatches: PositiveInt | None = None
    microbatch_size: PositiveInt | None = None
    pp_style: PipelineStyle = "1f1b"
    num_model_chunks: PositiveInt = 1
    num_layers_per_stage: tuple[_Count, ...] | None = None
    gradient_checkpoint_config: Any = None
    initial_scale: Annotated[float, Field(gt=0)] = 2.0**16
    max_norm: Annotated[float, Field(ge=0)] = 0.0

    min_scale: float = 1.0
    max_scale: float = 2.0**32
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    communication_dtype: Any = None
    custom_policy: Any = None
    fp8_communication: bool = False

    broadcast_buffers: bool = True
    ddp_bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    zero_bucket_size_in_m: int = 12
    overlap_communication: bool = True
    overlap_allgather: bool = False
    overlap_p2p: bool = True
    enable_metadata_cache: bool = True
    scheduler_nodes: Any = None
    make_vocab_size_divisible_by: int = 64
    dp_outside: bool = True
    moe_dp_outside: bool = True


_FIXED_LOSS_SCALE = "the loss scale of fp16 moves as it does by default: only initial_scale can be set"
REFUSED_UNLESS_DEFAULT = {
    **dict.fromkeys(
        ("min_scale", "max_scale", "growth_factor", "backoff_factor", "growth_interval"), _FIXED_LOSS_SCALE
    ),
    "communication_dtype": "gradients are reduced in fp32; there is no other type to choose",
    "custom_policy": "a further model family is an entry in a table, see docs/add-a-model.md",
    "fp8_communication": "messages are in the precision of the layers, sums of gradients in fp32",
}
"""Parameters whose other values would change what is computed; and why they are refused."""

_NO_DDP = "torch's DDP is not used"
WITHOUT_EFFECT = {
    "broadcast_buffers": _NO_DDP,
    "ddp_bucket_cap_mb": _NO_DDP,
    "find_unused_parameters": f"{_NO_DDP}; experts without tokens need no switch",
    "check_reduction": _NO_DDP,
    "gradient_as_bucket_view": _NO_DDP,
    "static_graph": _NO_DDP,
    "hysteresis": "the loss scale is lowered at the first overflow",
    "zero_bucket_size_in_m": "gradients are reduced layer by layer",
    "overlap_communication": "reductions always overlap the backward pass",
    "overlap_allgather": "parameters are always gathered ahead of the layer that needs them",
    "overlap_p2p": "messages between stages always overlap",
    "enable_metadata_cache": "shapes are fixed when the model is made, so nothing is sent to learn them",
    "scheduler_nodes": "the zbv schedule is worked out here",
    "make_vocab_size_divisible_by": "a vocabulary of any size is spread without padding",
    "dp_outside": "ranks are ordered pp, dp, sp, tp; numbers do not depend on it",
    "moe_dp_outside": "ranks are ordered pp, dp, sp, tp; numbers do not depend on it",
    "enable_fused_normalization": "norms are compiled with the layers, see enable_jit_fused",
    "enable_flash_attention": "attention always uses the fastest kernel that is there",
}
"""Parameters that are accepted and change nothing; and why."""
