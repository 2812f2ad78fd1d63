"""One linear per expert on rows sorted by expert: a grouped matrix product where torch has a fused one, else a loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hpjob.runtime.weight_gradients import DeferWeightGradients


def can_group(rows: Tensor, weight: Tensor) -> bool:
    """Whether the fused grouped product takes these tensors: bf16 on CUDA from compute capability 8.0, aligned rows."""
    if not hasattr(functional, "grouped_mm") or rows.device.type != "cuda" or rows.dtype != torch.bfloat16:
        return False
    aligned = all(size * weight.element_size() % 16 == 0 for size in weight.shape[1:])
    return aligned and torch.cuda.get_device_capability(rows.device) >= (8, 0)


@dataclass(frozen=True, kw_only=True)
class _Groups:
    rows_per_expert: list[int]
    offsets: Tensor | None
    """Where the fused product finds each expert's rows; None = a loop."""
    defer: DeferWeightGradients | None


class _GroupedLinear(torch.autograd.Function):
    """An expert without rows gets a gradient of zeros, whatever a fused kernel leaves there."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, groups: _Groups) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.groups = groups
        return _product(rows, weight.transpose(-2, -1), groups)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        groups: _Groups = ctx.groups
        grad = grad_outputs[0].contiguous()
        grad_rows = _product(grad, weight, groups) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_rows, None, None
        if groups.defer is not None:
            groups.defer([weight], lambda: (_weight_gradient(grad, rows, groups),))
            return grad_rows, None, None
        return grad_rows, _weight_gradient(grad, rows, groups), None


def _offsets(rows_per_expert: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(rows_per_expert, device=device).cumsum(0, dtype=torch.int32)


def _product(rows: Tensor, weight: Tensor, groups: _Groups) -> Tensor:
    """``rows @ weight[expert]`` for each expert's rows; weight (experts, features, outputs)."""
    if groups.offsets is not None:
        return functional.grouped_mm(rows, weight, offs=groups.offsets)
    parts = torch.split(rows, groups.rows_per_expert)
    return torch.cat([part @ expert for part, expert in zip(parts, weight.unbind(0), strict=True)])


def _weight_gradient(grad: Tensor, rows: Tensor, groups: _Groups) -> Tensor:
    """``grad.T @ rows`` for each expert's rows; (experts, outputs, features)."""
    if groups.offsets is not None:
        product = functional.grouped_mm(grad.transpose(0, 1), rows, offs=groups.offsets)
        is_empty = groups.offsets.diff(prepend=groups.offsets.new_zeros(1)) == 0
        return product.masked_fill(is_empty[:, None, None], 0)
    pairs = zip(torch.split(grad, groups.rows_per_expert), torch.split(rows, groups.rows_per_expert), strict=True)
    return torch.stack([grad_part.t() @ part for grad_part, part in pairs])


def grouped_linear(
    rows: Tensor,
    weight: Tensor,
    rows_per_expert: Sequence[int],
    defer: DeferWeightGradients | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """``rows @ weight[expert].T`` for each expert's rows.

    Args:
        rows: Shape (rows, features), sorted by expert.
        weight: Shape (experts, outputs, features). Experts without rows get gradients of zero.
        rows_per_expert: Sums to the number of rows.
        defer: Receives the computation of the weight gradient instead of autograd.
        offsets: Sums of ``rows_per_expert`` up to and with each expert, int32, where the rows are. Without them a
            fused product sends them there, for which the host waits until the device has done all that came before.

    Returns:
        Shape (rows, outputs).
    """
    is_fused = rows.shape[0] > 0 and can_group(rows, weight)
    if is_fused and offsets is None:
        offsets = _offsets(rows_per_expert, rows.device)
    groups = _Groups(rows_per_expert=list(rows_per_expert), offsets=offsets if is_fused else None, defer=defer)
    result: Tensor = _GroupedLinear.apply(rows, weight, groups)  # type: ignore[no-untyped-call]
    return result
