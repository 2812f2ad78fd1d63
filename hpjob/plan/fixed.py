"""A plan with every degree given: no search, no estimates.

Parity checks and tests name the layout themselves; the planner's estimates have no say there.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpjob.core.errors import UserInputError
from hpjob.plan.layout import split_layers
from hpjob.plan.model import MemoryEstimate, ParallelDegrees, Pipeline, Plan, RankPlace, TimeEstimate
from hpjob.recipe.model import PipelineStyle, Recipe


def _even_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    if num_layers < num_stages:
        raise UserInputError(
            f"{num_layers} decoder layers cannot fill {num_stages} pipeline stages",
            hint=f"use at most {num_layers} stages (pp_size * num_model_chunks)",
        )
    return split_layers(num_layers, num_stages)


def fixed_pipeline(
    recipe: Recipe,
    degrees: ParallelDegrees,
    *,
    num_microbatches: int,
    microbatch_size: int,
    style: PipelineStyle = "1f1b",
    num_model_chunks: int = 1,
    layers_per_stage: Sequence[int] | None = None,
) -> Pipeline:
    """Return the pipeline part of a plan; the layers are split evenly unless given."""
    stages = degrees.pp * num_model_chunks
    split = tuple(layers_per_stage or _even_split(recipe.model.num_hidden_layers, stages))
    if len(split) != stages or sum(split) != recipe.model.num_hidden_layers:
        raise UserInputError(
            f"layers_per_stage {list(split)} does not split {recipe.model.num_hidden_layers} layers "
            f"over {stages} stages",
            hint="give one number a stage, summing to num_hidden_layers",
        )
    return Pipeline(
        style=style,
        num_model_chunks=num_model_chunks,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        layers_per_stage=split,
    )


def fixed_plan(recipe: Recipe, degrees: ParallelDegrees, pipeline: Pipeline) -> Plan:
    """Return a plan with these degrees on one virtual node; estimates are zero.

    The remaining settings (ZeRO stage, recomputation, sequence parallelism) come from the recipe;
    ``auto`` there means the simplest value: ZeRO-1, no recomputation, none.
    """
    parallel = recipe.parallel
    checkpoint = parallel.gradient_checkpoint_config
    memory = tuple(
        MemoryEstimate(
            pp_rank=rank,
            weights_gib=0,
            gradients_gib=0,
            optimizer_gib=0,
            activations_gib=0,
            logits_gib=0,
            workspace_gib=0,
        )
        for rank in range(degrees.pp)
    )
    no_time = dict.fromkeys(TimeEstimate.model_fields, 0.0)
    mode = parallel.sequence_parallelism_mode
    return Plan(
        recipe=recipe.name,
        model_type=recipe.model.model_type,
        machine="fixed",
        num_nodes=1,
        gpus_per_node=degrees.world_size,
        degrees=degrees,
        zero_stage=1 if parallel.zero_stage == "auto" else parallel.zero_stage,
        zero_shard_size=parallel.zero_shard_size,
        sequence_parallelism_mode=None if mode == "auto" or parallel.enable_sequence_parallelism is False else mode,
        pipeline=pipeline,
        recompute="none" if checkpoint.policy == "auto" else checkpoint.policy,
        recompute_every_kth_layer=checkpoint.every_kth_layer,
        recompute_layers_per_stage=checkpoint.num_ckpt_layers_per_stage,
        precision=parallel.precision,
        cpu_offload=parallel.cpu_offload is True,
        global_batch_size=degrees.dp * pipeline.num_microbatches * pipeline.microbatch_size,
        seq_length=recipe.data.seq_length,
        placement=tuple(RankPlace(rank=rank, node=0, gpu=rank) for rank in range(degrees.world_size)),
        memory=memory,
        memory_limit_gib=0,
        time=TimeEstimate(**no_time),
        reasons=("degrees were given",),
    )
