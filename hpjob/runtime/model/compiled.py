"""Compiled layers and loss: fewer passes over memory, and a host that runs far ahead of the GPU.

What is compiled is ``forward`` itself, not the module: hooks of data parallelism then stay outside and one graph serves
all layers of a stage. Sizes are static, because kernels for any size are slower; a run has one size.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn
from torch._dynamo import config

from hpjob.plan.model import Plan
from hpjob.recipe.model import Recipe
from hpjob.runtime.model.stage import DecoderStage
from hpjob.runtime.moe.expert_parallel import ExpertParallelExperts

_VARIANTS = 64
"""Of one layer's function that may be compiled: one an engine and size. Beyond the compiler's own 8 it would raise.

Newer torch has the limit by thread; layers are compiled in that of the forward pass."""


def wants_compile(recipe: Recipe, device: torch.device) -> bool:
    """Whether layers are compiled: as the recipe says, else on GPUs where Triton makes the kernels."""
    wish = recipe.parallel.enable_jit_fused
    if wish == "auto":
        return device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return wish


def compiles_layers(plan: Plan, recipe: Recipe, device: torch.device) -> bool:
    """Whether :func:`compile_stage` can be used: products in parts cannot be traced."""
    return plan.sequence_parallelism_mode != "ring" and wants_compile(recipe, device)


def compile_stage(stage: DecoderStage, *, keeps_products: bool = False) -> None:
    """Compile the decoder layers, the last norm and the loss of a stage, in place and without graph breaks.

    Of a layer with experts the other modules are compiled, one graph each, attention only without tensor
    parallelism: how many tokens an expert gets is different every time, and hooks on experts stay outside.

    Args:
        stage: Its layers are in their places already.
        keeps_products: Gradients and inputs of linear layers are kept beyond the backward pass that made them.
    """
    config.recompile_limit = max(config.recompile_limit, _VARIANTS)
    # The compiler does not know that they are kept, so it must not write anything else where they lie.
    options = {"allow_buffer_reuse": False, "inplace_buffers": False} if keeps_products else None
    for layer in stage.decoder_layers:
        if stage.expert_block is None:
            _compile_forward(layer, options)
        else:
            _compile_around_experts(layer, layer.get_submodule(stage.expert_block), options)
    if stage.part.is_last:
        _compile_forward(stage.model.norm, options)
        stage.loss_sum = torch.compile(stage.loss_sum, fullgraph=True, dynamic=False)  # type: ignore[method-assign]


def _compile_around_experts(layer: nn.Module, block: nn.Module, options: dict[str, Any] | None) -> None:
    modules = [module for module in layer.children() if module is not block]
    modules += [module for module in block.children() if not isinstance(module, ExpertParallelExperts)]
    for module in modules:
        # Hooks at the edges of a tensor-parallel region would be a graph apart from the products that they prepare.
        if not module._forward_pre_hooks:
            _compile_forward(module, options)


def _compile_forward(module: Any, options: dict[str, Any] | None) -> None:
    module.forward = torch.compile(module.forward, fullgraph=True, dynamic=False, options=options)
