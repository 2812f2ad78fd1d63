"""The reference: one process, a plain transformers model, plain torch optimizer and clipping.

Nothing here uses our layers, schedule, loss or optimizer, so a fault that all layouts share shows too.
Only the initial weights and the batches come from the same functions.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from hpjob.recipe.model import ModelShape, OptimizerSettings, Recipe
from hpjob.runtime.engine import Batch
from hpjob.runtime.model.initial import initial_weight
from hpjob.runtime.parity.data import global_batch


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What a training run leaves behind.

    Attributes:
        losses: Mean token loss of every step.
        gradients: Unclipped gradients of the first update, by name: of step 1, unless fp16 overflowed there.
        weights: After the last step, by name.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def train_reference(recipe: Recipe, steps: int, documents: int = 1) -> Trajectory:
    """Train in one process in the recipe's precision; master weights, moments and norms are fp32."""
    model = _model(recipe)
    settings = recipe.optimizer
    optimizer = _optimizer(model, settings)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    scale = _Scale(recipe)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        losses.append(_backward(model, recipe, global_batch(recipe, step, documents), scale.value))
        if scale.overflowed(model):
            continue
        if not gradients:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if settings.max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = _rate(settings, step, recipe.training.steps)
        optimizer.step()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Trajectory(losses, gradients, weights)


class _Scale:
    """Loss scale of fp16; halved, and the update left out, whenever a gradient is not finite."""

    def __init__(self, recipe: Recipe) -> None:
        self._acts = recipe.parallel.precision == "fp16"
        self.value = recipe.parallel.initial_scale if self._acts else 1.0

    def overflowed(self, model: nn.Module) -> bool:
        found = self._acts and not all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        self.value *= 0.5 if found else 1.0
        return found


def _model(recipe: Recipe) -> nn.Module:
    shape: ModelShape = recipe.model
    experts = {"num_experts", "num_experts_per_tok", "moe_intermediate_size"}
    settings = shape.model_dump(exclude={"model_type", "rope_theta", *experts})
    settings |= {"head_dim": shape.attention_head_dim, **_expert_settings(shape)}
    # Token 0 is a token like any other here, also where the family takes it for padding.
    settings["pad_token_id"] = None
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    config = AutoConfig.for_model(shape.model_type, rope_parameters=rope, use_cache=False, **settings)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            start = {"std": shape.initializer_range, "gain": 0.0 if shape.model_type == "gemma" else 1.0}
            parameter.copy_(initial_weight(name, tuple(parameter.shape), seed=recipe.training.seed, **start))
    return model.train()


def _expert_settings(shape: ModelShape) -> dict[str, Any]:
    """Return the expert settings under the names of the family's configuration."""
    width = shape.moe_intermediate_size or shape.intermediate_size
    if shape.model_type == "mixtral":
        return {
            "num_local_experts": shape.num_experts,
            "num_experts_per_tok": shape.num_experts_per_tok,
            "intermediate_size": width,
        }
    if shape.model_type == "qwen3_moe":
        return {
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.num_experts_per_tok,
            "moe_intermediate_size": width,
            "norm_topk_prob": True,
        }
    return {}


def _optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


def _backward(model: nn.Module, recipe: Recipe, batch: Batch, scale: float) -> float:
    """Leave the gradients of the mean token loss on the fp32 model and return the loss."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[recipe.parallel.precision]
    compute = model if dtype is torch.float32 else copy.deepcopy(model).to(dtype)
    mask = None
    if batch.document_ids is not None:
        length = batch.input_ids.shape[1]
        allowed = batch.document_ids[:, :, None] == batch.document_ids[:, None, :]
        allowed &= torch.ones(length, length).tril().bool()
        mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min).unsqueeze(1)
    logits = compute(input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=mask).logits
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
    torch.autograd.backward(loss * scale)
    if compute is not model:
        for master, copied in zip(model.parameters(), compute.parameters(), strict=True):
            master.grad = None if copied.grad is None else copied.grad.float() / scale
    return loss.item()


def _rate(settings: OptimizerSettings, step: int, total: int) -> float:
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    done = (step - settings.warmup_steps) / (total - settings.warmup_steps)
    lowest = settings.lr * settings.min_lr_ratio
    if settings.schedule == "cosine":
        return lowest + (settings.lr - lowest) * (1 + math.cos(math.pi * done)) / 2
    return settings.lr if settings.schedule == "constant" else settings.lr + (lowest - settings.lr) * done
