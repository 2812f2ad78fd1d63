"""What this runtime cannot run, said before anything is built."""

from __future__ import annotations

from hpjob.core.errors import UserInputError
from hpjob.plan.legality import recomputation_problems
from hpjob.plan.model import Pipeline, Plan
from hpjob.recipe.model import Recipe
from hpjob.runtime.model.families import family_of
from hpjob.runtime.parallel.fp8 import ALIGNMENT
from hpjob.runtime.parallel.region import chunk_bounds
from hpjob.runtime.pipeline.schedule import SCHEDULES


def unsupported(plan: Plan, recipe: Recipe) -> list[str]:
    """Return one sentence for everything in a plan that this runtime cannot run."""
    return [
        *_unsupported_switches(plan),
        *_unsupported_sequence(plan, recipe),
        *_unsupported_experts(plan, recipe),
        *_unsupported_shapes(plan, recipe),
        *(_unsupported_fp8(plan, recipe) if recipe.parallel.use_fp8 else []),
    ]


def refuse_unsupported(plan: Plan, recipe: Recipe) -> None:
    """Raise for a plan that this runtime cannot run.

    Raises:
        UserInputError: One line a reason.
    """
    reasons = unsupported(plan, recipe)
    if reasons:
        raise UserInputError("\n".join(reasons), hint="change the parallel section of the recipe")


def _unsupported_switches(plan: Plan) -> list[str]:
    degrees, shard = plan.degrees, plan.zero_shard_size
    data_ranks = degrees.dp * degrees.sp
    reasons = []
    if plan.zero_stage == 0 and plan.cpu_offload:
        reasons.append("cpu_offload keeps the shards of ZeRO in the host's memory: it needs zero_stage of at least 1")
    if plan.zero_stage == 0 and shard is not None:
        reasons.append("zero_shard_size divides the shards of ZeRO into groups: it needs zero_stage of at least 1")
    elif shard is not None and data_ranks % shard:
        reasons.append(f"zero_shard_size {shard} does not divide dp {degrees.dp} x sp {degrees.sp} = {data_ranks}")
    elif shard is not None and shard % degrees.ep and degrees.ep % shard:
        reasons.append(f"zero_shard_size {shard} and ep {degrees.ep}: neither is a multiple of the other")
    return [*reasons, *recomputation_problems(plan), *_unsupported_pipeline(plan.pipeline, degrees.pp)]


def _unsupported_sequence(plan: Plan, recipe: Recipe) -> list[str]:
    mode, degrees = plan.sequence_parallelism_mode, plan.degrees
    if mode in ("split_gather", "ring"):
        reasons = [f"{mode} needs tp of at least 2"] if degrees.tp == 1 else []
        return [*reasons, f"sp {degrees.sp} is not possible: {mode} shares the tp group"] if degrees.sp > 1 else reasons
    if mode is None:
        return [f"sp {degrees.sp} needs a sequence_parallelism_mode"] if degrees.sp > 1 else []
    heads = recipe.model.num_attention_heads // degrees.tp
    if mode == "all_to_all" and heads % degrees.sp:
        return [
            f"all_to_all spreads the {heads} attention heads of a tp rank over sp, which {degrees.sp} does not divide"
        ]
    return []


def _unsupported_fp8(plan: Plan, recipe: Recipe) -> list[str]:
    shape, tp = recipe.model, plan.degrees.tp
    reasons = []
    if plan.precision == "fp16":
        reasons.append("use_fp8 goes with bf16 or fp32, not with the loss scale of fp16")
    if plan.sequence_parallelism_mode == "ring":
        reasons.append("use_fp8 is not possible with ring, which multiplies in pieces; use split_gather")
    if plan.pipeline.style == "zbv" and plan.degrees.pp > 1:
        reasons.append("use_fp8 is not possible with zbv, which puts weight gradients off; use 1f1b or interleaved")
    head = shape.attention_head_dim
    widths = {
        "hidden_size": shape.hidden_size,
        "the query heads of a tp rank": shape.num_attention_heads * head // tp,
        "the key-value heads of a tp rank": max(1, shape.num_key_value_heads // tp) * head,
        "the MLP width of a tp rank": shape.intermediate_size // tp,
    }
    return reasons + [
        f"use_fp8 needs widths in multiples of {ALIGNMENT}, but {name} is {width}"
        for name, width in widths.items()
        if width % ALIGNMENT
    ]


def _unsupported_experts(plan: Plan, recipe: Recipe) -> list[str]:
    shape, ep = recipe.model, plan.degrees.ep
    takes_experts = family_of(shape.model_type).expert_block is not None
    if takes_experts and shape.num_experts is None:
        return [f"{shape.model_type} needs num_experts and num_experts_per_tok"]
    if shape.num_experts is None:
        return [f"ep {ep} needs a model with experts"] if ep > 1 else []
    reasons = [] if takes_experts else [f"{shape.model_type} models have no experts"]
    if shape.num_experts % ep:
        reasons.append(f"num_experts {shape.num_experts} does not divide by ep {ep}")
    data_ranks = plan.degrees.dp * plan.degrees.sp
    if data_ranks % ep:
        reasons.append(f"dp {plan.degrees.dp} x sp {plan.degrees.sp} does not divide by ep {ep}")
    return reasons


def _unsupported_pipeline(pipeline: Pipeline, pp: int) -> list[str]:
    style, chunks = pipeline.style, pipeline.num_model_chunks
    if pp == 1:
        return ["more than one model chunk needs pp of at least 2"] if chunks > 1 else []
    if style not in SCHEDULES:
        return [f"pipeline style {style} is not supported, use {' or '.join(SCHEDULES)}"]
    if style == "1f1b":
        return [f"1f1b has one model chunk per pipeline rank, not {chunks}"] if chunks > 1 else []
    if style == "zbv":
        return [] if chunks == 2 else [f"zbv has two model chunks per pipeline rank, not {chunks}"]
    reasons = [] if chunks > 1 else [f"{style} needs at least two model chunks per pipeline rank"]
    if pipeline.num_microbatches % pp:
        reasons.append(f"{style} needs microbatches ({pipeline.num_microbatches}) in multiples of pp {pp}")
    return reasons


def _unsupported_shapes(plan: Plan, recipe: Recipe) -> list[str]:
    tp = plan.degrees.tp
    shape = recipe.model
    reasons = []
    if shape.num_attention_heads % tp:
        reasons.append(f"num_attention_heads {shape.num_attention_heads} does not divide by tp {tp}")
    if shape.num_key_value_heads % tp and tp % shape.num_key_value_heads:
        reasons.append(
            f"num_key_value_heads {shape.num_key_value_heads} and tp {tp}: neither is a multiple of the other"
        )
    width = shape.moe_intermediate_size or shape.intermediate_size
    if width % tp:
        reasons.append(f"intermediate_size {width} does not divide by tp {tp}")
    if chunk_bounds(shape.vocab_size, tp, tp - 1)[0] == shape.vocab_size:
        reasons.append(f"vocab_size {shape.vocab_size} leaves a rank of tp {tp} without tokens")
    expected = plan.degrees.dp * plan.pipeline.num_microbatches * plan.pipeline.microbatch_size
    if plan.global_batch_size != expected:
        reasons.append(
            f"global_batch_size {plan.global_batch_size} is not dp {plan.degrees.dp} x "
            f"{plan.pipeline.num_microbatches} microbatches x {plan.pipeline.microbatch_size} = {expected}"
        )
    stages = plan.degrees.pp * plan.pipeline.num_model_chunks
    layers = plan.pipeline.layers_per_stage
    if len(layers) != stages or sum(layers) != shape.num_hidden_layers or min(layers) < 1:
        reasons.append(
            f"layers_per_stage {list(layers)} does not split {shape.num_hidden_layers} layers over {stages} stages"
        )
    return reasons
