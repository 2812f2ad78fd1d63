"""Weight gradients that the backward pass adds straight to their sum over the microbatches.

Autograd would make the gradient of each microbatch in the weight's dtype first, and a further pass would add it to
the fp32 sum. Here the matrix product itself adds to the sum, and autograd gives the weight no gradient.

Compiled code calls one operator that the compiler does not look into. It finds the sum by where the weight lies, so
that one graph serves all layers: a sum that the graph knew would be made before, changed in place and guarded.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


class GradientSum(Protocol):
    """The sum of a weight's gradients."""

    def add_product(self, gradient: Tensor, inputs: Tensor) -> None:
        """Add ``gradient^T inputs``; (tokens, outputs) and (tokens, inputs)."""


_sums: WeakValueDictionary[int, GradientSum] = WeakValueDictionary()
"""By the address of the weight, which stays where it is as long as its sum is held."""


def sum_gradients_of(weight: Tensor, total: GradientSum) -> None:
    """Let :func:`summing_linear` add the gradients of a weight to a sum.

    Args:
        weight: What is multiplied with, not empty; its memory must not move.
        total: Held by the caller as long as the weight is used.
    """
    _sums[weight.data_ptr()] = total


def summing_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x W^T + b``; the backward pass adds the weight's gradient to its sum, see :func:`sum_gradients_of`.

    Args:
        inputs: (..., in_features); must want a gradient, for what computes it adds the weight's.
        weight: (out_features, in_features).
        bias: (out_features,); autograd makes its gradient.
    """
    product: Tensor = _SummingLinear.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]
    return product


class _SummingLinear(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias = bias is not None
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        gradient = gradients[0]
        backward = _compiled_backward if torch.compiler.is_compiling() else _backward
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias else None
        return backward(gradient, inputs, weight), None, of_bias


def _backward(gradient: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    rows = gradient.flatten(0, -2)
    _sums[weight.data_ptr()].add_product(rows, inputs.flatten(0, -2))
    return (rows @ weight).view(inputs.shape)


# It also changes the sum, which no graph can see. The gradient of the inputs is always used, so the call is kept.
_compiled_backward = torch.library.custom_op(
    "hpjob::summing_linear_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor gradient, Tensor inputs, Tensor weight) -> Tensor",
)


@_compiled_backward.register_fake
def _(gradient: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    return gradient.new_empty(inputs.shape)
