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
from hpjob.runtime.parallel.vocabulary import IGNORED_LABEL
from hpjob.runtime.parity.data import global_batch, rank_batch


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What a training run leaves behind.

    Attributes:
        losses: Mean token loss of every step.
        skipped: Steps that updated nothing because fp16 overflowed.
        gradients: Unclipped gradients of the first update, by name: of step 1, unless fp16 overflowed there.
        weights: After the last step, by name.
    """

    losses: list[float]
    skipped: list[int]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def train_reference(
    recipe: Recipe, steps: int, documents: int = 1, *, microbatch_size: int | None = None
) -> Trajectory:
    """Train in one process in the recipe's precision; master weights, moments and norms are fp32.

    Args:
        recipe: Model, data, optimizer.
        steps: Optimizer steps.
        documents: Packed into each sequence.
        microbatch_size: Sequences whose gradients are computed at once. In fp16 it decides which steps overflow,
            since the gradients of a whole batch can be too large where those of its parts are not; None = all.
    """
    model = _model(recipe)
    settings = recipe.optimizer
    optimizer = _optimizer(model, settings)
    losses: list[float] = []
    skipped: list[int] = []
    gradients: dict[str, Tensor] = {}
    scale = _Scale(recipe)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        batch = global_batch(recipe, step, documents)
        losses.append(_backward(model, recipe, batch, scale.value, microbatch_size or len(batch.input_ids)))
        if scale.overflowed(model):
            skipped.append(step)
            continue
        if not gradients:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if settings.max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = _rate(settings, step, recipe.training.steps)
        optimizer.step()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Trajectory(losses, skipped, gradients, weights)


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
    settings = shape.model_dump(exclude={"model_type", "rope_theta", "config_values", *experts})
    settings |= {"head_dim": shape.attention_head_dim, **_expert_settings(shape), **(shape.config_values or {})}
    # Token 0 is a token like any other here, also where the family takes it for padding.
    settings["pad_token_id"] = None
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    config = AutoConfig.for_model(shape.model_type, **{"rope_parameters": rope, "use_cache": False, **settings})
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


def _backward(model: nn.Module, recipe: Recipe, batch: Batch, scale: float, microbatch_size: int) -> float:
    """Leave the gradients of the mean token loss on the fp32 model and return the loss."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[recipe.parallel.precision]
    compute = model if dtype is torch.float32 else copy.deepcopy(model).to(dtype)
    num_tokens = (batch.labels != IGNORED_LABEL).sum()
    total = 0.0
    count = len(batch.input_ids) // microbatch_size
    for part in (rank_batch(batch, index, count) for index in range(count)):
        loss = _loss_sum(compute, part, dtype) / num_tokens
        torch.autograd.backward(loss * scale)
        total += loss.item()
        if compute is model:
            continue
        for master, copied in zip(model.parameters(), compute.parameters(), strict=True):
            if copied.grad is not None:
                gradient = copied.grad.float() / scale
                master.grad = gradient if master.grad is None else master.grad + gradient
                copied.grad = None
    return total


def _loss_sum(model: nn.Module, batch: Batch, dtype: torch.dtype) -> Tensor:
    mask = None
    if batch.document_ids is not None:
        length = batch.input_ids.shape[1]
        allowed = batch.document_ids[:, :, None] == batch.document_ids[:, None, :]
        allowed &= torch.ones(length, length).tril().bool()
        mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min).unsqueeze(1)
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=mask).logits
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )


def _rate(settings: OptimizerSettings, step: int, total: int) -> float:
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    done = (step - settings.warmup_steps) / (total - settings.warmup_steps)
    lowest = settings.lr * settings.min_lr_ratio
    if settings.schedule == "cosine":
        return lowest + (settings.lr - lowest) * (1 + math.cos(math.pi * done)) / 2
    return settings.lr if settings.schedule == "constant" else settings.lr + (lowest - settings.lr) * done
