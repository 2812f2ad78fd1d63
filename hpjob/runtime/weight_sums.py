"""Weight gradients that the backward pass hands on as the two factors of their product.

Autograd would make the gradient of each microbatch in the weight's dtype first, and a further pass would add it to
the fp32 sum. Here whoever receives the factors multiplies: straight into the sum, or later, where a pipeline schedule
has a gap. Autograd gives the weight no gradient.

Compiled code calls one operator that the compiler does not look into. It finds the receiver by a number in a tensor
on the CPU, so that one graph serves all layers and reading it waits for nothing.
"""

from __future__ import annotations

from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


class ProductReceiver(Protocol):
    """Takes the gradient of a weight."""

    def add_product(self, gradient: Tensor, inputs: Tensor) -> None:
        """Add ``gradient^T inputs``, now or later; (tokens, outputs) and (tokens, inputs)."""


_receivers: WeakValueDictionary[int, ProductReceiver] = WeakValueDictionary()
_numbers = count()


def number_of(receiver: ProductReceiver) -> Tensor:
    """Return what :func:`handing_linear` finds a receiver by, as long as the caller holds the receiver itself."""
    number = next(_numbers)
    _receivers[number] = receiver
    return torch.tensor(number, device="cpu")


def receiver_of(number: Tensor) -> ProductReceiver:
    """Return the receiver of that number."""
    return _receivers[int(number)]


def handing_linear(inputs: Tensor, weight: Tensor, number: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x W^T + b``; the backward pass hands the weight's gradient to its receiver.

    Args:
        inputs: (..., in_features); must want a gradient, for what computes it hands on the weight's.
        weight: (out_features, in_features).
        number: The receiver's, see :func:`number_of`.
        bias: (out_features,); autograd makes its gradient.
    """
    product: Tensor = _HandingLinear.apply(inputs, weight, number, bias)  # type: ignore[no-untyped-call]
    return product


class _HandingLinear(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, number: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight, number)
        ctx.has_bias = bias is not None
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, Tensor | None]:
        inputs, weight, number = ctx.saved_tensors
        gradient = gradients[0]
        backward = _compiled_backward if torch.compiler.is_compiling() else _backward
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias else None
        return backward(gradient, inputs, weight, number), None, None, of_bias


def _backward(gradient: Tensor, inputs: Tensor, weight: Tensor, number: Tensor) -> Tensor:
    rows = gradient.flatten(0, -2)
    receiver_of(number).add_product(rows, inputs.flatten(0, -2))
    return (rows @ weight).view(inputs.shape)


# It also changes what it hands to, which no graph can see. The gradient of the inputs is always used, so the call is
# kept.
_compiled_backward = torch.library.custom_op(
    "hpjob::handing_linear_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor gradient, Tensor inputs, Tensor weight, Tensor number) -> Tensor",
)


@_compiled_backward.register_fake
def _(gradient: Tensor, inputs: Tensor, weight: Tensor, number: Tensor) -> Tensor:
    return gradient.new_empty(inputs.shape)
