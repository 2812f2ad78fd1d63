"""The linear before a split of the sequence as an operator that a compiler does not look into.

Shown each step, the compiler would put product, sum and gather one after another; as one operator, each of its passes
communicates while it multiplies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpjob.runtime.sequence.compiled_gather import add_up
from hpjob.runtime.sequence.exchange import SequenceExchange, exchange_of
from hpjob.runtime.weight_sums import receiver_of


@torch.library.custom_op("hpjob::linear_scatter", mutates_args=())
def _forward(tensor: Tensor, weight: Tensor, numbers: list[Tensor], exchange: int) -> Tensor:
    return exchange_of(exchange).multiply_while_scattering([tensor], [weight.t()])()


@torch.library.custom_op("hpjob::linear_scatter_backward", mutates_args=())
def _backward(
    tensor: Tensor, weight: Tensor, gradient: Tensor, numbers: list[Tensor], wants_weight: bool, exchange: int
) -> list[Tensor]:
    whole, (of_tensor,) = exchange_of(exchange).multiply_while_gathering(gradient, [weight])
    rows, inputs = whole.flatten(0, 1), tensor.flatten(0, 1)
    if numbers:
        receiver_of(numbers[0]).add_product(rows, inputs)
    return [of_tensor, rows.t() @ inputs] if wants_weight else [of_tensor]


@_forward.register_fake
def _(tensor: Tensor, weight: Tensor, _: list[Tensor], exchange: int) -> Tensor:
    ranks = exchange_of(exchange)
    return tensor.new_empty((ranks.summands, tensor.shape[1] // ranks.group.size(), len(weight)))


@_backward.register_fake
def _(tensor: Tensor, weight: Tensor, _: Tensor, __: list[Tensor], wants_weight: bool, ___: int) -> list[Tensor]:
    return [tensor.new_empty(made.shape) for made in ((tensor, weight) if wants_weight else (tensor,))]


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, list[Tensor], int], output: Tensor) -> None:
    tensor, weight, numbers, ctx.exchange = inputs
    ctx.save_for_backward(tensor, weight, *numbers)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, list[None], None]:
    tensor, weight, *numbers = ctx.saved_tensors
    wants_weight = ctx.needs_input_grad[1]
    # All summands have the same gradient.
    of_tensor, *made = _backward(tensor, weight, gradient[:1], numbers, wants_weight, ctx.exchange)
    return of_tensor, made[0] if made else None, [None] * len(numbers), None


_forward.register_autograd(_differentiate, setup_context=_save)


def compiled_linear_scatter(
    tensor: Tensor, weight: Tensor, number: Tensor | None, exchange: SequenceExchange
) -> Tensor:
    """Row-parallel linear whose sum over the group is left split along the sequence, inside compiled code.

    Args:
        tensor: Shape (1, whole sequence, local features).
        weight: Shape (outputs, local features).
        number: Of who receives the weight's gradient; None = autograd. See :mod:`hpjob.runtime.weight_sums`.
        exchange: Of the tensor-parallel ranks.

    Returns:
        Shape (1, local sequence, outputs).
    """
    if number is None or not tensor.requires_grad:
        return add_up(_forward(tensor, weight, [], exchange.number))
    # Of a weight that autograd knows it would make a gradient of zeros.
    return add_up(_forward(tensor, weight.detach(), [number], exchange.number))
