"""Megatron's sequence parallelism: activations between tensor-parallel regions are split along the sequence.

The four edges with their gradients, and the two linears at them. With a batch of one, all tokens in one row, whatever
is gathered or scattered lies as it is needed; else each of them costs a copy. A linear behind a gather saves only
its shard of the input. In the backward pass the whole input comes again with the gradient that the block's other edge
gathers, or else, where no block is named, by one more gather while the gradient of the input is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from hpjob.runtime.sequence.overlapped_products import multiply_while_gathering, multiply_while_scattering
from hpjob.runtime.sequence.ring import Ring, circulate
from hpjob.runtime.sequence.sequence_collectives import (
    check_divisible,
    cut_pieces,
    join_pieces,
    local_part,
    start_gather,
    start_reduction,
    unflatten,
    wait_for,
)
from hpjob.runtime.weight_gradients import DeferWeightGradients


def _gather(shard: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    # Compiled code needs the form that the compiler can see into.
    if torch.compiler.is_compiling():
        # Along dim 0 and moved here: torch 2.11 cannot trace its own move to another dim.
        shards = wait_for(functional.all_gather_tensor(shard.contiguous(), 0, group))
        return join_pieces(unflatten(shards, 0, group.size()), dim)
    return start_gather(shard, group, dim).wait()


def _reduce(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    if torch.compiler.is_compiling():
        pieces = cut_pieces(tensor, group.size(), dim)
        return wait_for(functional.reduce_scatter_tensor(pieces, "sum", 0, group)).squeeze(0)
    return start_reduction(tensor, group, dim).wait()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: dist.ProcessGroup, dim: int, sum_gradients: bool) -> Tensor:
        ctx.group, ctx.dim, ctx.sum_gradients = group, dim, sum_gradients
        return _gather(shard, group, dim)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.sum_gradients:
            return _reduce(grad_outputs[0], ctx.group, ctx.dim), None, None, None
        return local_part(grad_outputs[0], ctx.group, ctx.dim), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, dim: int, sum_inputs: bool) -> Tensor:
        ctx.group, ctx.dim = group, dim
        if sum_inputs:
            return _reduce(tensor, group, dim)
        return local_part(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        return _gather(grad_outputs[0], ctx.group, ctx.dim), None, None, None


def gather_sequence(shard: Tensor, group: dist.ProcessGroup, *, dim: int = 1) -> Tensor:
    """All-gather forward, reduce-scatter backward: before work that is divided over the group."""
    result: Tensor = _Gather.apply(shard, group, dim, True)  # type: ignore[no-untyped-call]
    return result


def gather_sequence_replicated(shard: Tensor, group: dist.ProcessGroup, *, dim: int = 1) -> Tensor:
    """All-gather forward, own part backward: before work that every rank of the group repeats."""
    result: Tensor = _Gather.apply(shard, group, dim, False)  # type: ignore[no-untyped-call]
    return result


def reduce_scatter_sequence(partial: Tensor, group: dist.ProcessGroup, *, dim: int = 1) -> Tensor:
    """Reduce-scatter forward, all-gather backward: after work that is divided over the group."""
    result: Tensor = _Scatter.apply(partial, group, dim, True)  # type: ignore[no-untyped-call]
    return result


def split_sequence(tensor: Tensor, group: dist.ProcessGroup, *, dim: int = 1) -> Tensor:
    """Own part forward, all-gather backward: after work that every rank of the group repeats."""
    result: Tensor = _Scatter.apply(tensor, group, dim, False)  # type: ignore[no-untyped-call]
    return result


class BlockInput:
    """Carries the whole input of a block from its last linear to its first ones within one backward pass."""

    def __init__(self) -> None:
        self._whole: Tensor | None = None

    def give(self, whole: Tensor) -> None:
        """Leave what was gathered."""
        self._whole = whole

    def take(self) -> Tensor | None:
        """Return what was gathered and forget it; None = nothing was."""
        whole, self._whole = self._whole, None
        return whole


@dataclass(frozen=True, kw_only=True)
class SequenceLinearSettings:
    """How a linear at an edge of a split sequence communicates.

    Attributes:
        group: The tensor-parallel ranks.
        is_ring: Send shards around a ring, one multiplication behind another, in place of one collective.
        defer_weight_gradients: Receives the weight gradients' computation instead of autograd.
        block: The same for the linears at both edges of a block, of whom one then gathers for the other.
    """

    group: dist.ProcessGroup
    is_ring: bool = False
    defer_weight_gradients: DeferWeightGradients | None = None
    block: BlockInput | None = None


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, settings: SequenceLinearSettings, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.settings = settings
        ctx.save_for_backward(shard, *weights)
        if not settings.is_ring:
            return tuple(multiply_while_gathering(shard, [weight.t() for weight in weights], settings.group)[1])
        parts: list[tuple[Tensor, ...]] = [()] * dist.get_world_size(settings.group)
        for source, visiting in _ring_shards(shard, settings.group):
            parts[source] = tuple(visiting @ weight.t() for weight in weights)
        return tuple(torch.cat(pieces, dim=1) for pieces in zip(*parts, strict=True))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        settings: SequenceLinearSettings = ctx.settings
        shard, *weights = ctx.saved_tensors

        whole = None if settings.block is None else settings.block.take()

        def weight_gradients() -> tuple[Tensor, ...]:
            if whole is not None:
                return tuple(_weight_gradient(grad, whole) for grad in grad_outputs)
            return _gathered_weight_gradients(shard, grad_outputs, weights, settings)

        def partial(grads: Sequence[Tensor]) -> Tensor:
            total: Tensor = grads[0] @ weights[0]
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                total.flatten(0, 1).addmm_(grad.flatten(0, 1), weight)
            return total

        now = any(ctx.needs_input_grad[2:]) and settings.defer_weight_gradients is None
        if settings.is_ring:
            shard_grad = _ring_reduce(grad_outputs, partial, settings.group)
            weight_grads: Sequence[Tensor | None] = weight_gradients() if now else (None,) * len(weights)
        else:
            regather = start_gather(shard, settings.group) if now and whole is None else None
            reduction = start_reduction(partial(grad_outputs), settings.group)
            whole = whole if regather is None else regather.wait()
            weight_grads = weight_gradients() if now else (None,) * len(weights)
            shard_grad = reduction.wait()
        if any(ctx.needs_input_grad[2:]) and settings.defer_weight_gradients is not None:
            settings.defer_weight_gradients(weights, weight_gradients)
        return shard_grad, None, *weight_grads


class _LinearReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, settings: SequenceLinearSettings, weight: Tensor, block_shard: Tensor | None
    ) -> Tensor:
        ctx.settings = settings
        ctx.save_for_backward(tensor, weight, block_shard)
        check_divisible(tensor.shape[1], dist.get_world_size(settings.group))
        if settings.is_ring:
            return _ring_reduce((tensor,), lambda parts: parts[0] @ weight.t(), settings.group)
        return multiply_while_scattering([tensor], [weight.t()], settings.group)()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        settings: SequenceLinearSettings = ctx.settings
        tensor, weight, block_shard = ctx.saved_tensors
        grad = grad_outputs[0]
        width = grad.shape[-1]
        rides_along = settings.block is not None and block_shard is not None and block_shard.dtype == grad.dtype
        # Side by side in each row, whose halves the products then read where they lie.
        travelling = torch.cat([grad, block_shard], dim=-1) if rides_along else grad
        if settings.is_ring:
            size = dist.get_world_size(settings.group)
            arrived: list[Tensor] = [travelling] * size
            products: list[Tensor] = [grad] * size
            for source, visiting in _ring_shards(travelling, settings.group):
                arrived[source], products[source] = visiting, visiting[..., :width] @ weight
            gathered, grad_input = torch.cat(arrived, dim=1), torch.cat(products, dim=1)
        else:
            gathered, (grad_input,) = multiply_while_gathering(travelling, [weight], settings.group, width=width)
        whole = gathered[..., :width]
        if settings.block is not None and rides_along:
            settings.block.give(gathered[..., width:])
        if not ctx.needs_input_grad[2]:
            return grad_input, None, None, None
        if settings.defer_weight_gradients is not None:
            settings.defer_weight_gradients([weight], lambda: (_weight_gradient(whole, tensor),))
            return grad_input, None, None, None
        return grad_input, None, _weight_gradient(whole, tensor), None


def _weight_gradient(grad_output: Tensor, tensor: Tensor) -> Tensor:
    return grad_output.flatten(0, 1).t() @ tensor.flatten(0, 1)


def _gathered_weight_gradients(
    shard: Tensor, grad_outputs: Sequence[Tensor], weights: Sequence[Tensor], settings: SequenceLinearSettings
) -> tuple[Tensor, ...]:
    """Weight gradients from a shard of the input: gathers, or accumulates in fp32 while the shards pass by."""
    if not settings.is_ring:
        whole = start_gather(shard, settings.group).wait()
        return tuple(_weight_gradient(grad, whole) for grad in grad_outputs)
    length = shard.shape[1]
    sums = [torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32)) for weight in weights]
    for source, visiting in _ring_shards(shard, settings.group):
        for total, grad in zip(sums, grad_outputs, strict=True):
            total.add_(_weight_gradient(grad.narrow(1, source * length, length), visiting))
    return tuple(total.to(weight.dtype) for total, weight in zip(sums, weights, strict=True))


def _ring_shards(shard: Tensor, group: dist.ProcessGroup) -> Any:
    ring = Ring(group=group)
    for outer_step, inner_step, (visiting,) in circulate(ring, shard, is_kept=True):
        yield ring.source(outer_step, inner_step), visiting


def _ring_reduce(
    tensors: Sequence[Tensor], partial: Callable[[Sequence[Tensor]], Tensor], group: dist.ProcessGroup
) -> Tensor:
    """Reduce-scatter along the sequence of ``partial(tensors)``, which is computed one part of the sequence a step.

    The sum for a rank starts at the rank after it and comes home at the last step; it travels while the next part is
    computed.
    """
    ring = Ring(group=group)
    rank, size = ring.rank, ring.size
    length = tensors[0].shape[1] // size
    total = tensors[0]
    for step in range(size):
        start = (rank - 1 - step) % size * length
        arriving = ring.send_inner(total) if step else None
        total = partial([tensor.narrow(1, start, length) for tensor in tensors])
        if arriving is not None:
            (arrived,) = arriving.wait()
            total = total + arrived
    return total


def gather_linear(shard: Tensor, weights: Sequence[Tensor], settings: SequenceLinearSettings) -> tuple[Tensor, ...]:
    """Column-parallel linears on one gathered sequence, such as q, k and v; only the shard is saved.

    Args:
        shard: Shape (batch, local sequence, features).
        weights: Each (local outputs, features); one gather serves all.
        settings: Group and manner of communication.

    Returns:
        For each weight, shape (batch, whole sequence, local outputs). A bias is the caller's.
    """
    result: tuple[Tensor, ...] = _GatherLinear.apply(shard, settings, *weights)  # type: ignore[no-untyped-call]
    return result


def linear_reduce_scatter(
    tensor: Tensor, weight: Tensor, settings: SequenceLinearSettings, block_shard: Tensor | None = None
) -> Tensor:
    """Row-parallel linear whose sum over the group is left split along the sequence.

    Args:
        tensor: Shape (batch, whole sequence, local features).
        weight: Shape (outputs, local features).
        settings: Group and manner of communication.
        block_shard: Shard that entered the block of ``settings``, shaped like the result; gathered on the way back.

    Returns:
        Shape (batch, local sequence, outputs). A bias is the caller's.

    Raises:
        UserInputError: The sequence is no multiple of the group size.
    """
    result: Tensor = _LinearReduceScatter.apply(tensor, settings, weight, block_shard)  # type: ignore[no-untyped-call]
    return result
