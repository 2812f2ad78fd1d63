"""Differentiable collectives over the tensor-parallel group, on plain local tensors."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.autograd import Function

from hpjob.runtime.sequence.sequence_collectives import wait_for

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, op: Literal["sum", "max"] = "sum") -> Tensor:
    """Reduce a tensor over a group in place and return it. Every tensor-parallel sum comes through here.

    Compiled code gets the form that the compiler can see into, and decides itself what is done in place.
    """
    if torch.compiler.is_compiling():
        return wait_for(functional.all_reduce(tensor, op, group))
    dist.all_reduce(tensor, op=_OPERATIONS[op], group=group)
    return tensor


class _CopyToGroup(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient.clone().contiguous(), ctx.group), None


class _ReduceFromGroup(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        if not torch.compiler.is_compiling():
            ctx.mark_dirty(tensor)
        return all_reduce(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def copy_to_group(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Enter a tensor-parallel region: identity forward, sum of the gradients backward."""
    if group.size() == 1:
        return tensor
    return _CopyToGroup.apply(tensor, group)  # type: ignore[no-untyped-call,no-any-return]


def reduce_from_group(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Leave a tensor-parallel region: sum forward (in place, ``tensor`` is consumed), identity backward."""
    if group.size() == 1:
        return tensor
    return _ReduceFromGroup.apply(tensor.contiguous(), group)  # type: ignore[no-untyped-call,no-any-return]
