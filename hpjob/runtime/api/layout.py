"""From a plugin's parameters and a model to recipe and plan, refused with the nearest legal layouts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpjob.core.errors import UserInputError
from hpjob.core.schema import parse
from hpjob.plan.broken_rules import broken_rules
from hpjob.plan.fixed import fixed_pipeline, fixed_plan
from hpjob.plan.hardware import hardware_of
from hpjob.plan.legality import layout_of, model_problems, problems, unsupported_by_runtime
from hpjob.plan.model import ParallelDegrees, Plan
from hpjob.plan.nearest import nearest_layouts
from hpjob.plan.problem import Problem
from hpjob.plan.shape import shape_of
from hpjob.recipe.config_json import shape_from_config, shape_from_values
from hpjob.recipe.model import DataSettings, ModelShape, OptimizerSettings, Recipe, TrainingSettings
from hpjob.runtime.api.parameters import PluginParameters
from hpjob.runtime.api.refusals import recomputation
from hpjob.topology.load import load_machine

_NAME = "HybridParallelPlugin"
_MACHINE = "hgx-h100"


def recipe_for(
    p: PluginParameters,
    model: object,
    *,
    seq_length: int | None,
    global_batch_size: int | None,
    optimizer: OptimizerSettings | Mapping[str, Any] | None,
    steps: int | None,
    seed: int | None,
) -> Recipe:
    """Return a recipe with the plugin's layout; see :meth:`HybridParallelPlugin.configure` for the arguments.

    Raises:
        UserInputError: A value is missing or wrong.
    """
    base = model if isinstance(model, Recipe) else None
    seq_length = seq_length or (base.data.seq_length if base else None)
    global_batch_size = global_batch_size or (base.training.global_batch_size if base else None)
    if seq_length is None or global_batch_size is None:
        raise UserInputError(
            "seq_length and global_batch_size are missing",
            hint="give both: tokens of a sequence, and sequences of an optimizer step over all ranks",
        )
    training = base.training if base else TrainingSettings(global_batch_size=global_batch_size, steps=steps or 1000)
    changes = {"global_batch_size": global_batch_size, "steps": steps or training.steps, "seed": seed}
    given = {name: value for name, value in changes.items() if value is not None}
    data = base.data if base else DataSettings(seq_length=seq_length)
    return Recipe(
        name=base.name if base else _NAME,
        model=base.model if base else model_shape(model),
        data=data.model_copy(update={"seq_length": seq_length}),
        training=TrainingSettings(**{**training.model_dump(), **given}),
        optimizer=_optimizer(optimizer, base, p.max_norm),
        parallel=parse(type(Recipe.model_fields["parallel"].default), _parallel(p), source=_NAME),
    )


def model_shape(model: object) -> ModelShape:
    """Return the shape of a model given as shape, config of transformers, mapping, or path of a folder.

    Raises:
        UserInputError: It is none of these, or not of a known family.
    """
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, str | Path):
        return parse(ModelShape, shape_from_config(Path(model)), source=str(model))
    values = model if isinstance(model, Mapping) else getattr(model, "to_dict", dict)()
    if not values:
        raise UserInputError(
            f"a {type(model).__name__} is no description of a model",
            hint="give a recipe, a config of transformers, a dict of its values, or the path of a config.json",
        )
    return parse(ModelShape, shape_from_values(dict(values), source="model"), source="model")


def plan_for(p: PluginParameters, recipe: Recipe, world_size: int) -> Plan:
    """Return the plan of the plugin's layout.

    Raises:
        UserInputError: It is not legal; every reason is named, and the nearest layouts that are.
    """
    problem = Problem(
        shape=shape_of(recipe.model),
        settings=recipe.parallel,
        seq=recipe.data.seq_length,
        global_batch=recipe.training.global_batch_size,
        world_size=world_size,
        hardware=hardware_of(load_machine(_MACHINE)),
    )
    reasons = model_problems(recipe.model) + broken_rules(problem)
    if not reasons:
        plan = _fixed(p, recipe, world_size)
        reasons = problems(problem.shape, layout_of(plan), world_size) + unsupported_by_runtime(plan)
        if not reasons:
            return plan
    nearby = nearest_layouts(problem)
    hint = "nearest legal layouts: " + "; ".join(nearby) if nearby else "change the number of ranks or the batch"
    raise UserInputError("\n".join(f"{_NAME}: {reason}" for reason in reasons), hint=hint)


def _fixed(p: PluginParameters, recipe: Recipe, world_size: int) -> Plan:
    sp = _own_sp(p)
    dp = world_size // (p.tp_size * p.pp_size * sp)
    degrees = ParallelDegrees(pp=p.pp_size, dp=dp, sp=sp, tp=p.tp_size, ep=p.ep_size)
    per_rank = recipe.training.global_batch_size // dp
    size = p.microbatch_size or per_rank // (p.num_microbatches or 1)
    pipeline = fixed_pipeline(
        recipe,
        degrees,
        num_microbatches=per_rank // size,
        microbatch_size=size,
        style=p.pp_style if p.pp_size > 1 else "1f1b",
        num_model_chunks=p.num_model_chunks if p.pp_size > 1 else 1,
        layers_per_stage=p.num_layers_per_stage if p.pp_size > 1 else None,
    )
    plan = fixed_plan(recipe, degrees, pipeline)
    if p.inner_ring_size is None:
        return plan
    # A ring inside a node is as long as the sequence-parallel ranks that lie there.
    return plan.model_copy(update={"gpus_per_node": p.inner_ring_size * p.tp_size})


def _own_sp(p: PluginParameters) -> int:
    return (p.sp_size or 1) if p.sequence_parallelism_mode in ("all_to_all", "ring_attn") else 1


def _parallel(p: PluginParameters) -> dict[str, Any]:
    same = (
        "tp_size",
        "pp_size",
        "ep_size",
        "zero_stage",
        "zero_shard_size",
        "cpu_offload",
        "precision",
        "use_fp8",
        "initial_scale",
    )
    has_batch = p.num_microbatches is not None or p.microbatch_size is not None
    return {
        **{name: getattr(p, name) for name in same},
        "sp_size": _own_sp(p),
        "pp_style": p.pp_style if p.pp_size > 1 else "1f1b",
        "num_model_chunks": p.num_model_chunks if p.pp_size > 1 else 1,
        "num_microbatches": p.num_microbatches or ("auto" if has_batch else 1),
        "microbatch_size": p.microbatch_size or "auto",
        "enable_sequence_parallelism": p.enable_sequence_parallelism,
        "sequence_parallelism_mode": p.sequence_parallelism_mode or "auto",
        "enable_jit_fused": "auto" if p.enable_all_optimization else p.enable_jit_fused,
        "gradient_checkpoint_config": recomputation(p.gradient_checkpoint_config).model_dump(),
    }


def _optimizer(
    given: OptimizerSettings | Mapping[str, Any] | None, base: Recipe | None, max_norm: float
) -> OptimizerSettings:
    if given is None and base is not None:
        return base.optimizer
    settings = dict(given) if isinstance(given, Mapping) else {} if given is None else given.model_dump()
    return parse(OptimizerSettings, {"max_norm": max_norm, **settings}, source="optimizer")
