"""Linears behind a gathered sequence as operators that a compiler does not look into.

Were the gather visible, the compiler would keep the whole input for the backward pass: it never repeats a collective.
As one operator with a gradient of its own, only what that asks for is kept, which is the shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpjob.runtime.sequence.sequence_collectives import start_gather, start_reduction
from hpjob.runtime.weight_sums import receiver_of


# Lists, not sequences, and names of groups: what an operator's schema can say.
@torch.library.custom_op("hpjob::gather_linear", mutates_args=())
def _forward(
    shard: Tensor, weights: list[Tensor], numbers: list[Tensor], handed: list[bool], group_name: str
) -> list[Tensor]:
    whole = start_gather(shard, _group(group_name)).wait()
    return [whole @ weight.t() for weight in weights]


@torch.library.custom_op("hpjob::gather_linear_backward", mutates_args=())
def _backward(
    shard: Tensor,
    weights: list[Tensor],
    gradients: list[Tensor],
    numbers: list[Tensor],
    handed: list[bool],
    group_name: str,
) -> list[Tensor]:
    group = _group(group_name)
    regather = start_gather(shard, group)
    partial = gradients[0] @ weights[0]
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        partial.flatten(0, 1).addmm_(gradient.flatten(0, 1), weight)
    reduction = start_reduction(partial, group)
    whole = regather.wait().flatten(0, 1)
    of_weights = []
    waiting = iter(numbers)
    for gradient, is_handed in zip(gradients, handed, strict=True):
        if is_handed:
            receiver_of(next(waiting)).add_product(gradient.flatten(0, 1), whole)
        else:
            of_weights.append(gradient.flatten(0, 1).t() @ whole)
    return [reduction.wait(), *of_weights]


@_forward.register_fake
def _(shard: Tensor, weights: list[Tensor], _: list[Tensor], __: list[bool], group_name: str) -> list[Tensor]:
    batch, length, _features = shard.shape
    return [shard.new_empty((batch, length * _group(group_name).size(), weight.shape[0])) for weight in weights]


@_backward.register_fake
def _(
    shard: Tensor, weights: list[Tensor], _: list[Tensor], __: list[Tensor], handed: list[bool], ___: str
) -> list[Tensor]:
    made = [weight for weight, is_handed in zip(weights, handed, strict=True) if not is_handed]
    return [shard.new_empty(tensor.shape) for tensor in (shard, *made)]


def _group(name: str) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type,unused-ignore]
    return group


def _save(ctx: Any, inputs: tuple[Tensor, list[Tensor], list[Tensor], list[bool], str], output: list[Tensor]) -> None:
    shard, weights, numbers, ctx.handed, ctx.group_name = inputs
    ctx.num_weights = len(weights)
    ctx.save_for_backward(shard, *weights, *numbers)


def _differentiate(ctx: Any, gradients: list[Tensor]) -> tuple[Tensor, list[Tensor | None], list[None], None, None]:
    shard, *kept = ctx.saved_tensors
    weights, numbers = kept[: ctx.num_weights], kept[ctx.num_weights :]
    of_shard, *made = _backward(shard, weights, gradients, numbers, ctx.handed, ctx.group_name)
    waiting = iter(made)
    of_weights = [None if is_handed else next(waiting) for is_handed in ctx.handed]
    return of_shard, of_weights, [None] * len(numbers), None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def compiled_gather_linear(
    shard: Tensor, weights: Sequence[Tensor], numbers: Sequence[Tensor | None], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Column-parallel linears on one gathered sequence, inside compiled code; only the shard is saved.

    Args:
        shard: Shape (batch, local sequence, features).
        weights: Each (local outputs, features).
        numbers: Of each weight, who receives its gradient; None = autograd. See :mod:`hpjob.runtime.weight_sums`.
        group: The tensor-parallel ranks.

    Returns:
        For each weight, shape (batch, whole sequence, local outputs).
    """
    receiving = [number for number in numbers if number is not None]
    handed = [number is not None for number in numbers]
    return tuple(_forward(shard, list(weights), receiving, handed, group.group_name))
