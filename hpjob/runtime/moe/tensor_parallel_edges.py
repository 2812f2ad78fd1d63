"""Edges of the experts' tensor-parallel region: same input on all ranks, partial sums out."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        total = grad_outputs[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _SumOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


def sum_gradients(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensor itself; its gradient is summed over the group."""
    result: Tensor = _SumGradients.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


def sum_outputs(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the group; the gradient goes to every rank as it is."""
    result: Tensor = _SumOutputs.apply(partial, group)  # type: ignore[no-untyped-call]
    return result
