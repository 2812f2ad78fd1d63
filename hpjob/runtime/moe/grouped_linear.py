"""One linear per expert on rows sorted by expert: a grouped matrix product where torch has a fused one, else a loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def can_group(rows: Tensor, weight: Tensor) -> bool:
    """Whether the fused grouped product takes these tensors: bf16 on CUDA from compute capability 8.0, aligned rows."""
    if not hasattr(functional, "grouped_mm") or rows.device.type != "cuda" or rows.dtype != torch.bfloat16:
        return False
    aligned = all(size * weight.element_size() % 16 == 0 for size in weight.shape[1:])
    return aligned and torch.cuda.get_device_capability(rows.device) >= (8, 0)


class _GroupedLinear(torch.autograd.Function):
    """Fused products with gradients of experts without rows set to zero, whatever the kernel leaves there."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, offsets: Tensor, empty: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, offsets, empty)
        return functional.grouped_mm(rows, weight.transpose(-2, -1), offs=offsets)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, offsets, empty = ctx.saved_tensors
        grad = grad_outputs[0].contiguous()
        grad_rows = functional.grouped_mm(grad, weight, offs=offsets)
        grad_weight = functional.grouped_mm(grad.transpose(0, 1), rows, offs=offsets)
        return grad_rows, grad_weight.masked_fill(empty[:, None, None], 0), None, None


def grouped_linear(rows: Tensor, weight: Tensor, rows_per_expert: Sequence[int]) -> Tensor:
    """``rows @ weight[expert].T`` for each expert's rows.

    Args:
        rows: Shape (rows, features), sorted by expert.
        weight: Shape (experts, outputs, features). Experts without rows get gradients of zero.
        rows_per_expert: Sums to the number of rows.

    Returns:
        Shape (rows, outputs).
    """
    if rows.shape[0] and can_group(rows, weight):
        counts = torch.tensor(rows_per_expert, dtype=torch.int32).to(rows.device, non_blocking=True)
        offsets = counts.cumsum(0, dtype=torch.int32)
        result: Tensor = _GroupedLinear.apply(rows, weight, offsets, counts == 0)  # type: ignore[no-untyped-call]
        return result
    parts = torch.split(rows, list(rows_per_expert))
    return torch.cat([functional.linear(part, expert) for part, expert in zip(parts, weight.unbind(0), strict=True)])
