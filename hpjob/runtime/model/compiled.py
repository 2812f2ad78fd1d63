"""Compiled layers and loss: fewer passes over memory, and a host that runs far ahead of the GPU.

What is compiled is ``forward`` itself, not the module: FSDP2's hooks then stay outside and one graph serves all
layers of a stage. Sizes are static, because kernels for any size are slower; a run has one size.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from hpjob.plan.model import Plan
from hpjob.recipe.model import Recipe
from hpjob.runtime.model.stage import DecoderStage


def wants_compile(recipe: Recipe, device: torch.device) -> bool:
    """Whether layers are compiled: as the recipe says, else on GPUs where Triton makes the kernels."""
    wish = recipe.parallel.enable_jit_fused
    if wish == "auto":
        return device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return wish


def compiles_layers(plan: Plan, recipe: Recipe, device: torch.device) -> bool:
    """Whether :func:`compile_stage` can be used: messages inside a layer and deferred gradients cannot be traced."""
    traceable = plan.sequence_parallelism_mode in (None, "split_gather")
    traceable = traceable and plan.pipeline.style != "zbv" and recipe.model.num_experts is None
    return traceable and wants_compile(recipe, device)


def compile_stage(stage: DecoderStage) -> None:
    """Compile the decoder layers, the last norm and the loss of a stage, in place and without graph breaks."""
    modules: list[Any] = [*stage.decoder_layers]
    if stage.part.is_last:
        modules.append(stage.model.norm)
    for module in modules:
        module.forward = torch.compile(module.forward, fullgraph=True, dynamic=False)
    if stage.part.is_last:
        stage.loss_sum = torch.compile(stage.loss_sum, fullgraph=True, dynamic=False)  # type: ignore[method-assign]
