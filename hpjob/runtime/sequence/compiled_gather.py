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


# Lists, not sequences, and names of groups: what an operator's schema can say.
@torch.library.custom_op("hpjob::gather_linear", mutates_args=())
def _forward(shard: Tensor, weights: list[Tensor], group_name: str) -> list[Tensor]:
    whole = start_gather(shard, _group(group_name)).wait()
    return [whole @ weight.t() for weight in weights]


@torch.library.custom_op("hpjob::gather_linear_backward", mutates_args=())
def _backward(shard: Tensor, weights: list[Tensor], gradients: list[Tensor], group_name: str) -> list[Tensor]:
    group = _group(group_name)
    regather = start_gather(shard, group)
    partial = gradients[0] @ weights[0]
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        partial.flatten(0, 1).addmm_(gradient.flatten(0, 1), weight)
    reduction = start_reduction(partial, group)
    whole = regather.wait().flatten(0, 1)
    of_weights = [gradient.flatten(0, 1).t() @ whole for gradient in gradients]
    return [reduction.wait(), *of_weights]


@_forward.register_fake
def _(shard: Tensor, weights: list[Tensor], group_name: str) -> list[Tensor]:
    batch, length, _ = shard.shape
    return [shard.new_empty((batch, length * _group(group_name).size(), weight.shape[0])) for weight in weights]


@_backward.register_fake
def _(shard: Tensor, weights: list[Tensor], gradients: list[Tensor], group_name: str) -> list[Tensor]:
    return [shard.new_empty(tensor.shape) for tensor in (shard, *weights)]


def _group(name: str) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type,unused-ignore]
    return group


def _save(ctx: Any, inputs: tuple[Tensor, list[Tensor], str], output: list[Tensor]) -> None:
    shard, weights, ctx.group_name = inputs
    ctx.save_for_backward(shard, *weights)


def _differentiate(ctx: Any, gradients: list[Tensor]) -> tuple[Tensor, list[Tensor], None]:
    shard, *weights = ctx.saved_tensors
    of_shard, *of_weights = _backward(shard, weights, gradients, ctx.group_name)
    return of_shard, of_weights, None


_forward.register_autograd(_differentiate, setup_context=_save)


def compiled_gather_linear(shard: Tensor, weights: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Column-parallel linears on one gathered sequence, inside compiled code; only the shard is saved.

    Args:
        shard: Shape (batch, local sequence, features).
        weights: Each (local outputs, features).
        group: The tensor-parallel ranks.

    Returns:
        For each weight, shape (batch, whole sequence, local outputs).
    """
    return tuple(_forward(shard, list(weights), group.group_name))
