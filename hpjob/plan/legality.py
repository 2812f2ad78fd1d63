"""The one place that says which layouts are allowed, and why not; planner and runtime both ask here."""

from __future__ import annotations

from dataclasses import dataclass

from hpjob.plan.layout import Layout, relieved_split, split_layers
from hpjob.plan.model import Plan
from hpjob.plan.shape import Shape
from hpjob.recipe.config_json import KNOWN_FAMILIES
from hpjob.recipe.model import ModelShape


@dataclass(frozen=True, slots=True)
class RuntimeCapabilities:
    """What the runtime can execute."""

    schedules: tuple[str, ...] = ("1f1b", "interleaved", "zbv")
    sequence_modes: tuple[str, ...] = ("split_gather", "ring", "all_to_all", "ring_attn")
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = ("none", "selective", "full")
    max_ep: int = 1024
    cpu_offload: bool = True
    families: tuple[str, ...] = KNOWN_FAMILIES
    expert_families: tuple[str, ...] = ("mixtral", "qwen3_moe")
    precisions: tuple[str, ...] = ("bf16", "fp16", "fp32")


RUNTIME = RuntimeCapabilities()
_EXPERT_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def model_problems(model: ModelShape, capabilities: RuntimeCapabilities = RUNTIME) -> list[str]:
    """Return what contradicts itself in a model of a family that the runtime has, as sentences."""
    family = model.model_type
    if family not in capabilities.families:
        return []
    experts, chosen = model.num_experts, model.num_experts_per_tok
    if family not in capabilities.expert_families:
        has_them = ", ".join(capabilities.expert_families)
        asked = [name for name in _EXPERT_FIELDS if getattr(model, name) is not None]
        return [f"{family} models have no experts, but {', '.join(asked)} is set ({has_them} have)"] if asked else []
    if experts is None or chosen is None:
        return [f"{family} needs num_experts and num_experts_per_tok"]
    return [f"num_experts_per_tok {chosen} is more than num_experts {experts}"] if chosen > experts else []


def problems(shape: Shape, layout: Layout, world_size: int) -> list[str]:
    """Return every rule that a layout breaks, as sentences; an empty list means it is legal."""
    return _degree_problems(shape, layout, world_size) + problems_beside_degrees(shape, layout)


def problems_beside_degrees(shape: Shape, layout: Layout) -> list[str]:
    """Return the rules of schedule, sequence and sharding that a layout breaks, as sentences."""
    found = _pipeline_problems(shape, layout)
    found += _sequence_problems(shape, layout)
    found += _sharding_problems(layout)
    if layout.fp8 and layout.sequence_mode == "ring":
        found.append("use_fp8 is not possible with ring, which multiplies in pieces")
    if layout.fp8 and layout.style == "zbv":
        found.append("use_fp8 is not possible with zbv, which puts weight gradients off")
    return found


def _sharding_problems(layout: Layout) -> list[str]:
    shard = layout.zero_shard
    if layout.zero == 0:
        found = ["offloading to the host needs ZeRO stage 1 or more"] if layout.cpu_offload else []
        return found + (["zero_shard_size needs ZeRO stage 1 or more"] if shard is not None else [])
    if shard is None:
        return []
    if layout.data_ranks % shard:
        return [f"dp {layout.dp} x sp {layout.sp} does not divide by zero_shard_size {shard}"]
    if shard % layout.ep and layout.ep % shard:
        return [f"zero_shard_size {shard} and ep {layout.ep}: neither is a multiple of the other"]
    return []


def _degree_problems(shape: Shape, layout: Layout, world_size: int) -> list[str]:
    found = []
    tp, pp, sp, ep = layout.tp, layout.pp, layout.sp, layout.ep
    if layout.world_size != world_size:
        found.append(
            f"pp {pp} x dp {layout.dp} x sp {sp} x tp {tp} = {layout.world_size} is not the world size {world_size}"
        )
    if shape.heads % tp:
        found.append(f"{shape.heads} attention heads do not divide by tp {tp}")
    elif shape.kv_heads % tp and tp % shape.kv_heads:
        found.append(f"{shape.kv_heads} key-value heads and tp {tp}: neither is a multiple of the other")
    if shape.ffn % tp:
        found.append(f"MLP width {shape.ffn} does not divide by tp {tp}")
    if -(-shape.vocab // tp) * (tp - 1) >= shape.vocab:
        found.append(f"vocabulary {shape.vocab} leaves a rank of tp {tp} without tokens")
    if ep > 1 and not shape.num_experts:
        found.append(f"ep {ep} needs a model with experts")
    elif ep > 1 and shape.num_experts % ep:
        found.append(f"{shape.num_experts} experts do not divide by ep {ep}")
    if ep > 1 and (layout.dp * sp) % ep:
        found.append(f"dp {layout.dp} x sp {sp} does not divide by ep {ep}")
    return found


def _pipeline_problems(shape: Shape, layout: Layout) -> list[str]:
    found = []
    pp, chunks, m = layout.pp, layout.chunks, layout.num_microbatches
    if shape.num_layers < pp * chunks:
        found.append(f"{shape.num_layers} layers are fewer than pp {pp} x {chunks} chunks")
    if layout.style == "1f1b" and chunks != 1:
        found.append(f"1f1b has one model chunk per rank, not {chunks}")
    if layout.style == "interleaved" and chunks < 2:
        found.append("interleaved needs at least two model chunks per rank")
    if layout.style == "zbv" and chunks != 2:
        found.append("zbv has two model chunks per rank")
    if layout.style != "1f1b" and pp == 1:
        found.append(f"{layout.style} needs pp of at least 2")
    if layout.style == "interleaved" and m % pp:
        found.append(f"interleaved needs microbatches ({m}) in multiples of pp {pp}")
    return found


def _sequence_problems(shape: Shape, layout: Layout) -> list[str]:
    """Sequences that do not divide are padded, so their length breaks no rule."""
    mode, sp, tp = layout.sequence_mode, layout.sp, layout.tp
    if mode is None:
        return [f"sp {sp} needs sequence parallelism: all_to_all or ring_attn"] if sp > 1 else []
    if layout.sharded_norms:
        found = [f"{mode} shares the TP group, so tp must be above 1"] if tp == 1 else []
        return found + ([f"{mode} has no axis of its own, so sp must be 1, not {sp}"] if sp > 1 else [])
    if mode == "all_to_all" and shape.heads % (sp * tp):
        return [f"{shape.heads} heads do not divide by sp {sp} x tp {tp} (all_to_all)"]
    return []


def unsupported_layout(layout: Layout, capabilities: RuntimeCapabilities = RUNTIME) -> list[str]:
    """Return what the runtime cannot execute of a legal layout, as sentences."""
    c = capabilities
    found = []
    if layout.pp > 1 and layout.style not in c.schedules:
        found.append(f"the runtime has no {layout.style} schedule (it has {', '.join(c.schedules)})")
    if layout.sequence_mode is not None and layout.sequence_mode not in c.sequence_modes:
        found.append(f"the runtime has no {layout.sequence_mode} sequence parallelism")
    if layout.zero not in c.zero_stages:
        found.append(f"the runtime has no ZeRO stage {layout.zero} (it has {', '.join(map(str, c.zero_stages))})")
    if layout.recompute not in c.recompute:
        found.append(f"the runtime has no {layout.recompute} recomputation (it has {', '.join(c.recompute)})")
    if layout.ep > c.max_ep:
        found.append("the runtime has no expert parallelism")
    if layout.cpu_offload and not c.cpu_offload:
        found.append("the runtime cannot offload to the host's memory")
    if layout.precision not in c.precisions:
        found.append(f"the runtime has no {layout.precision} precision (it has {', '.join(c.precisions)})")
    return found


def unsupported_by_runtime(plan: Plan, capabilities: RuntimeCapabilities = RUNTIME) -> list[str]:
    """Return what the runtime cannot execute of a plan, as sentences; empty = it can run."""
    found = unsupported_layout(layout_of(plan), capabilities)
    if plan.model_type not in capabilities.families:
        found.append(f"the runtime has no {plan.model_type} models (it has {', '.join(capabilities.families)})")
    return found + recomputation_problems(plan)


def recomputation_problems(plan: Plan) -> list[str]:
    """Return why the numbers of layers to recompute do not fit the stages of a plan, as sentences."""
    counts, layers = plan.recompute_layers_per_stage, plan.pipeline.layers_per_stage
    if counts is None:
        return []
    if plan.recompute != "full":
        return [f"num_ckpt_layers_per_stage needs the recomputation policy full, not {plan.recompute}"]
    if len(counts) != len(layers) or any(n > held for n, held in zip(counts, layers, strict=False)):
        return [f"num_ckpt_layers_per_stage {list(counts)} does not fit stages of {list(layers)} layers"]
    return []


def layout_of(plan: Plan) -> Layout:
    """Return the layout that a plan describes."""
    d, p = plan.degrees, plan.pipeline
    return Layout(
        tp=d.tp,
        pp=d.pp,
        dp=d.dp,
        sp=d.sp,
        ep=d.ep,
        num_microbatches=p.num_microbatches,
        microbatch=p.microbatch_size,
        seq=plan.seq_length,
        sequence_mode=plan.sequence_parallelism_mode,
        zero=plan.zero_stage,
        zero_shard=plan.zero_shard_size,
        style=p.style,
        chunks=p.num_model_chunks,
        relief=_relief(p.layers_per_stage),
        recompute=plan.recompute,
        every_kth=plan.recompute_every_kth_layer,
        precision=plan.precision,
        cpu_offload=plan.cpu_offload,
    )


def _relief(layers_per_stage: tuple[int, ...]) -> int:
    """How many layers fewer than an even split the last stage has; other splits are priced as even ones."""
    even = split_layers(sum(layers_per_stage), len(layers_per_stage))
    relief = even[-1] - layers_per_stage[-1]
    is_known = relief > 0 and relieved_split(sum(even), len(even), relief) == layers_per_stage
    return relief if is_known else 0
