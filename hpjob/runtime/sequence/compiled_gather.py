"""Linears behind a gathered sequence as operators that a compiler does not look into.

Were the gather visible, the compiler would keep the whole input for the backward pass: it never repeats a collective.
As one operator with a gradient of its own, only what that asks for is kept, which is the shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hpjob.runtime.sequence.exchange import SequenceExchange, exchange_of
from hpjob.runtime.weight_sums import receiver_of


# Lists, not sequences, and numbers of exchanges: what an operator's schema can say.
@torch.library.custom_op("hpjob::gather_linear", mutates_args=())
def _forward(
    shard: Tensor, weights: list[Tensor], numbers: list[Tensor], handed: list[bool], exchange: int
) -> list[Tensor]:
    return exchange_of(exchange).products(shard, [weight.t() for weight in weights])


@torch.library.custom_op("hpjob::gather_linear_backward", mutates_args=())
def _backward(
    shard: Tensor,
    weights: list[Tensor],
    gradients: list[Tensor],
    numbers: list[Tensor],
    handed: list[bool],
    exchange: int,
) -> list[Tensor]:
    ranks = exchange_of(exchange)
    regather = ranks.gather(shard)
    of_shard = ranks.multiply_while_scattering(gradients, weights)
    whole = regather.wait().flatten(0, 1)
    of_weights = []
    waiting = iter(numbers)
    for gradient, is_handed in zip(gradients, handed, strict=True):
        if is_handed:
            receiver_of(next(waiting)).add_product(gradient.flatten(0, 1), whole)
        else:
            of_weights.append(gradient.flatten(0, 1).t() @ whole)
    return [of_shard(), *of_weights]


@_forward.register_fake
def _(shard: Tensor, weights: list[Tensor], _: list[Tensor], __: list[bool], exchange: int) -> list[Tensor]:
    batch, length, _features = shard.shape
    return [shard.new_empty((batch, length * exchange_of(exchange).group.size(), len(weight))) for weight in weights]


@_backward.register_fake
def _(
    shard: Tensor, weights: list[Tensor], _: list[Tensor], __: list[Tensor], handed: list[bool], exchange: int
) -> list[Tensor]:
    made = [weight for weight, is_handed in zip(weights, handed, strict=True) if not is_handed]
    of_shard = shard.new_empty((exchange_of(exchange).summands, *shard.shape[1:]))
    return [of_shard, *(weight.new_empty(weight.shape) for weight in made)]


def _save(ctx: Any, inputs: tuple[Tensor, list[Tensor], list[Tensor], list[bool], int], output: list[Tensor]) -> None:
    shard, weights, numbers, ctx.handed, ctx.exchange = inputs
    ctx.num_weights = len(weights)
    ctx.save_for_backward(shard, *weights, *numbers)


def _differentiate(ctx: Any, gradients: list[Tensor]) -> tuple[Tensor, list[Tensor | None], list[None], None, None]:
    shard, *kept = ctx.saved_tensors
    weights, numbers = kept[: ctx.num_weights], kept[ctx.num_weights :]
    of_shard, *made = _backward(shard, weights, gradients, numbers, ctx.handed, ctx.exchange)
    waiting = iter(made)
    of_weights = [None if is_handed else next(waiting) for is_handed in ctx.handed]
    return add_up(of_shard), of_weights, [None] * len(numbers), None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def add_up(summands: Tensor) -> Tensor:
    """Return (summands, tokens, width) as (1, tokens, width); the compiler makes one pass of it and what follows."""
    return summands if len(summands) == 1 else summands.sum(0, keepdim=True)


def compiled_gather_linear(
    shard: Tensor, weights: Sequence[Tensor], numbers: Sequence[Tensor | None], exchange: SequenceExchange
) -> tuple[Tensor, ...]:
    """Column-parallel linears on one gathered sequence, inside compiled code; only the shard is saved.

    Args:
        shard: Shape (1, local sequence, features).
        weights: Each (local outputs, features).
        numbers: Of each weight, who receives its gradient; None = autograd. See :mod:`hpjob.runtime.weight_sums`.
        exchange: Of the tensor-parallel ranks.

    Returns:
        For each weight, shape (1, whole sequence, local outputs).
    """
    if not shard.requires_grad:
        # Nothing would then ask for what hands gradients on.
        numbers = [None] * len(weights)
    receiving = [number for number in numbers if number is not None]
    handed = [number is not None for number in numbers]
    # Of a weight that autograd knows it would make a gradient of zeros.
    known = [weight.detach() if is_handed else weight for weight, is_handed in zip(weights, handed, strict=True)]
    return tuple(_forward(shard, known, receiving, handed, exchange.number))
