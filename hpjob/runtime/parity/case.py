"""One parity case: a line such as ``tp_size=2 pp_size=2 zero_stage=1 precision=fp32``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from hpjob.core.errors import UserInputError
from hpjob.core.schema import nearest, parse
from hpjob.plan.fixed import fixed_pipeline, fixed_plan
from hpjob.plan.model import ParallelDegrees, Plan
from hpjob.recipe.model import ModelShape, Recipe

_DEGREES = ("tp_size", "pp_size", "sp_size", "ep_size")
_PARALLEL = (
    "zero_stage",
    "zero_shard_size",
    "precision",
    "enable_sequence_parallelism",
    "sequence_parallelism_mode",
    "initial_scale",
    "cpu_offload",
    "enable_jit_fused",
    "use_fp8",
)
_PIPELINE = ("num_microbatches", "microbatch_size", "pp_style", "num_model_chunks", "layers_per_stage")
_OPTIMIZER = ("lr", "max_norm", "weight_decay", "schedule", "warmup_steps")
_MODEL = tuple(name for name in ModelShape.model_fields if name != "model_type")
_RECOMPUTE = ("recompute", "every_kth_layer", "num_ckpt_layers_per_stage")
_OTHER = ("dp_size", "seq_length", "seed", "documents", "model_type", "gpus_per_node", *_RECOMPUTE)
_KEYS = (*_DEGREES, *_PARALLEL, *_PIPELINE, *_OPTIMIZER, *_MODEL, *_OTHER)

_DEFAULT_MODEL: Mapping[str, object] = {
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 320,
}


@dataclass(frozen=True, slots=True)
class Case:
    """A layout and a model to train with it.

    Attributes:
        text: The line it was written as.
        recipe: Model, data, optimizer.
        plan: The layout.
        documents: Packed into each sequence.
    """

    text: str
    recipe: Recipe
    plan: Plan
    documents: int = 1

    @property
    def world(self) -> int:
        return self.plan.degrees.world_size


def parse_case(text: str, *, world: int | None, steps: int, model_type: str = "llama") -> Case:
    """Read a case.

    Args:
        text: ``key=value`` pairs: degrees (``tp_size``, ``pp_size``, ``dp_size``, …), switches of the recipe's
            ``parallel`` section, ``num_microbatches``, ``microbatch_size``, ``layers_per_stage=3,5``,
            ``recompute``, ``every_kth_layer``, ``num_ckpt_layers_per_stage=2,0``, ``seq_length``, ``seed``,
            ``documents`` packed into a sequence,
            ``gpus_per_node``, and any key of the recipe's ``model`` and ``optimizer`` sections.
        world: Processes to fill with data parallelism when there is no ``dp_size``; None = dp 1 then.
        steps: Optimizer steps.
        model_type: Model family of cases that do not say ``model_type``.

    Raises:
        UserInputError: A key or value is unknown, or the degrees do not divide the world.
    """
    values = _pairs(text)
    degrees = _degrees(values, world)
    num_microbatches = int(str(values.get("num_microbatches", 4 if degrees.pp > 1 else 2)))
    microbatch_size = int(str(values.get("microbatch_size", 1)))
    recipe = parse(
        Recipe,
        {
            "name": "parity",
            "model": {"model_type": values.get("model_type", model_type), **_DEFAULT_MODEL, **_chosen(values, _MODEL)},
            "data": {"seq_length": values.get("seq_length", 32)},
            "training": {
                "global_batch_size": degrees.dp * num_microbatches * microbatch_size,
                "steps": steps,
                "seed": values.get("seed", 42),
            },
            "optimizer": {"lr": 1e-3, "warmup_steps": 4, **_chosen(values, _OPTIMIZER)},
            "parallel": {
                **_chosen(values, (*_DEGREES, *_PARALLEL)),
                "gradient_checkpoint_config": {
                    "policy": values.get("recompute", "none"),
                    "every_kth_layer": values.get("every_kth_layer", 1),
                    "num_ckpt_layers_per_stage": _integers(values.get("num_ckpt_layers_per_stage")),
                },
            },
        },
        source=f"case {text!r}",
    )
    pipeline = fixed_pipeline(
        recipe,
        degrees,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        style=str(values.get("pp_style", "1f1b")),  # type: ignore[arg-type]
        num_model_chunks=int(str(values.get("num_model_chunks", 1))),
        layers_per_stage=_integers(values.get("layers_per_stage")),
    )
    plan = fixed_plan(recipe, degrees, pipeline)
    per_node = int(str(values.get("gpus_per_node", plan.gpus_per_node)))
    plan = plan.model_copy(update={"gpus_per_node": per_node})
    return Case(text, recipe, plan, int(str(values.get("documents", 1))))


def _pairs(text: str) -> dict[str, object]:
    values: dict[str, object] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if not equals or key not in _KEYS:
            guess = nearest(key, _KEYS)
            raise UserInputError(
                f"case {text!r}: {word!r} is no setting",
                hint=f"did you mean {guess}=…?" if guess else f"known keys are {', '.join(_KEYS)}",
            )
        # YAML 1.1 takes 1e-3 for a word.
        values[key] = float(value) if _is_exponent(value) else yaml.safe_load(value)
    return values


def _is_exponent(value: str) -> bool:
    mantissa, e, exponent = value.lower().partition("e")
    return bool(e) and mantissa.replace(".", "").isdigit() and exponent.lstrip("+-").isdigit()


def _chosen(values: Mapping[str, object], keys: tuple[str, ...]) -> dict[str, object]:
    return {key: values[key] for key in keys if key in values}


def _integers(value: object) -> tuple[int, ...] | None:
    return None if value is None else tuple(int(part) for part in str(value).split(","))


def _degrees(values: Mapping[str, object], world: int | None) -> ParallelDegrees:
    sizes = {key.removesuffix("_size"): values.get(key, 1) for key in _DEGREES}
    degrees = parse(ParallelDegrees, sizes, source="case")
    if "dp_size" in values:
        return parse(ParallelDegrees, {**sizes, "dp": values["dp_size"]}, source="case")
    if world is None:
        return degrees
    if world % degrees.world_size:
        raise UserInputError(
            f"tp {degrees.tp} x pp {degrees.pp} x sp {degrees.sp} = {degrees.world_size} does not divide "
            f"the world of {world}",
            hint="give dp_size, or another --world",
        )
    return degrees.model_copy(update={"dp": world // degrees.world_size})
