"""Rules of the plugin's parameters that need no model: each broken one is a sentence."""

from __future__ import annotations

from typing import Any

from hpjob.core.errors import UserInputError
from hpjob.core.schema import parse
from hpjob.recipe.model import GradientCheckpointSettings
from hpjob.runtime.api.parameters import REFUSED_UNLESS_DEFAULT, WITHOUT_EFFECT, PluginParameters


def broken_rules(p: PluginParameters) -> list[str]:
    """Return every broken rule."""
    fields = PluginParameters.model_fields
    found = [
        f"{name}={getattr(p, name)!r} is not supported: {why}"
        for name, why in REFUSED_UNLESS_DEFAULT.items()
        if getattr(p, name) != fields[name].default
    ]
    return [*found, *_sequence_rules(p), *_pipeline_rules(p)]


def notes(p: PluginParameters) -> list[str]:
    """Return a sentence for every parameter that was set and changes nothing."""
    fields = PluginParameters.model_fields
    return [
        f"{name}={getattr(p, name)!r} has no effect: {why}"
        for name, why in WITHOUT_EFFECT.items()
        if getattr(p, name) != fields[name].default
    ]


def _sequence_rules(p: PluginParameters) -> list[str]:
    mode, sp = p.sequence_parallelism_mode, p.sp_size or 1
    if p.inner_ring_size is not None and (mode != "ring_attn" or sp % p.inner_ring_size):
        return [f"inner_ring_size={p.inner_ring_size} needs ring_attn and must divide sp_size {sp}"]
    if not p.enable_sequence_parallelism:
        found = [f"sp_size={sp} needs enable_sequence_parallelism=True"] if sp > 1 else []
        return [*found, f"sequence_parallelism_mode={mode!r} needs enable_sequence_parallelism=True"] if mode else found
    if mode is None:
        return [
            "enable_sequence_parallelism=True needs a sequence_parallelism_mode: split_gather or ring over the tp "
            "group, all_to_all or ring_attn over sp_size ranks"
        ]
    found = []
    if mode in ("split_gather", "ring"):
        if p.tp_size == 1:
            found.append(f"{mode} shares the tp group, so tp_size must be above 1")
        if sp not in (1, p.tp_size):
            found.append(f"{mode} shares the tp group: leave sp_size out, not {sp}")
    return found


def _pipeline_rules(p: PluginParameters) -> list[str]:
    chunks = p.num_model_chunks
    if p.pp_size == 1:
        return []
    found = []
    if p.num_microbatches is None and p.microbatch_size is None:
        found.append(f"pp_size={p.pp_size} needs num_microbatches or microbatch_size")
    if p.pp_style == "1f1b" and chunks != 1:
        found.append(f"pp_style='1f1b' has one model chunk a rank: num_model_chunks=1, not {chunks}")
    if p.pp_style == "interleaved" and chunks < 2:
        found.append("pp_style='interleaved' needs num_model_chunks of at least 2")
    if p.pp_style == "zbv" and chunks != 2:
        found.append(f"pp_style='zbv' has two model chunks a rank: num_model_chunks=2, not {chunks}")
    split = p.num_layers_per_stage
    if split is not None and len(split) != p.pp_size * chunks:
        found.append(f"num_layers_per_stage has {len(split)} numbers, there are {p.pp_size * chunks} stages")
    return found


def recomputation(config: Any) -> GradientCheckpointSettings:
    """Read a gradient_checkpoint_config.

    Args:
        config: None, a ratio of layers, one of our settings or its fields, or an object with
            ``gradient_checkpointing_ratio`` or ``num_ckpt_layers_per_stage``.

    Raises:
        UserInputError: It asks for something else than every k-th layer.
    """
    if config is None:
        return GradientCheckpointSettings(policy="none")
    if isinstance(config, GradientCheckpointSettings):
        return config
    if isinstance(config, dict):
        return parse(GradientCheckpointSettings, config, source="gradient_checkpoint_config")
    counts = getattr(config, "num_ckpt_layers_per_stage", None)
    if counts is not None:
        return GradientCheckpointSettings(policy="full", num_ckpt_layers_per_stage=tuple(counts))
    ratio = config if isinstance(config, int | float) else getattr(config, "gradient_checkpointing_ratio", None)
    if not isinstance(ratio, int | float):
        raise UserInputError(
            f"gradient_checkpoint_config={config!r} is not supported",
            hint="give a ratio such as 0.5, or {'policy': 'full', 'every_kth_layer': 2}",
        )
    if ratio == 0:
        return GradientCheckpointSettings(policy="none")
    every = round(1 / ratio) if 0 < ratio <= 1 else 0
    if not every or abs(1 / every - ratio) > 1e-6:
        raise UserInputError(
            f"gradient_checkpoint_config: a ratio of {ratio} is no every k-th layer",
            hint="use 0, or 1 divided by a whole number: 1, 0.5, 0.25, …",
        )
    return GradientCheckpointSettings(policy="full", every_kth_layer=every)
