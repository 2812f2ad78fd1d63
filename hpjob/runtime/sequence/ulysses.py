"""Ulysses: swap a split sequence for split heads around attention, by all-to-all.

Outside attention a rank holds all heads of its contiguous part of the sequence; inside it holds the whole sequence
of its part of the heads. Four all-to-alls a layer forward (q, k, v, output) and four backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from hpjob.core.errors import UserInputError
from hpjob.runtime.sequence.sequence_collectives import wait_for

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Whole-sequence attention on tensors (batch, heads, sequence, head_dim), whatever it masks."""

_HEADS, _SEQUENCE = 1, 2


def ulysses_kv_heads(num_heads: int, num_kv_heads: int, sp_size: int) -> int:
    """Number of kv heads that travel: the smallest multiple of ``num_kv_heads`` that ``sp_size`` divides.

    Equal to ``num_kv_heads`` where that is divisible; otherwise each kv head is sent to several ranks.

    Args:
        num_heads: Query heads of one tensor-parallel rank.
        num_kv_heads: kv heads of one tensor-parallel rank.
        sp_size: Size of the sequence-parallel group.

    Raises:
        UserInputError: The query heads cannot be divided.
    """
    if num_heads % sp_size or num_heads % num_kv_heads:
        divisors = [str(n) for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise UserInputError(
            f"all_to_all cannot spread {num_heads} heads (with {num_kv_heads} kv heads) over sp_size {sp_size}",
            hint=f"choose parallel.sp_size from {', '.join(divisors)} (heads of one tp rank must be a multiple of "
            "sp_size), or use ring_attn",
        )
    return math.lcm(num_kv_heads, sp_size)


def _swap(tensor: Tensor, group: dist.ProcessGroup, scatter_dim: int, gather_dim: int) -> Tensor:
    pieces = torch.stack(tensor.chunk(group.size(), dim=scatter_dim))
    if torch.compiler.is_compiling():
        # Compiled code needs the form that the compiler can see into.
        received = wait_for(functional.all_to_all_single(pieces, None, None, group))
    else:
        received = torch.empty_like(pieces)
        dist.all_to_all_single(received, pieces, group=group)
    return torch.cat(received.unbind(0), dim=gather_dim)


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, scatter_dim: int, gather_dim: int) -> Tensor:
        ctx.group, ctx.scatter_dim, ctx.gather_dim = group, scatter_dim, gather_dim
        return _swap(tensor, group, scatter_dim, gather_dim)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        return _swap(grad_outputs[0], ctx.group, ctx.gather_dim, ctx.scatter_dim), None, None, None


def scatter_heads(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(batch, heads, local sequence, head_dim) to (batch, local heads, sequence, head_dim)."""
    result: Tensor = _Swap.apply(tensor, group, _HEADS, _SEQUENCE)  # type: ignore[no-untyped-call]
    return result


def gather_heads(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(batch, local heads, sequence, head_dim) to (batch, heads, local sequence, head_dim)."""
    result: Tensor = _Swap.apply(tensor, group, _SEQUENCE, _HEADS)  # type: ignore[no-untyped-call]
    return result


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, attention: AttentionFunction
) -> Tensor:
    """Attention over a sequence split contiguously over ``group``.

    Args:
        q: Shape (batch, heads, local sequence, head_dim).
        k: Shape (batch, kv_heads, local sequence, head_dim).
        v: Shape of ``k``.
        group: The sequence-parallel ranks, in the order of their parts of the sequence.
        attention: Called on the whole sequence of this rank's heads.

    Returns:
        Shape of ``q``.

    Raises:
        UserInputError: The heads cannot be divided over the group.
    """
    travelling = ulysses_kv_heads(q.shape[1], k.shape[1], dist.get_world_size(group))
    if travelling != k.shape[1]:
        k, v = (tensor.repeat_interleave(travelling // tensor.shape[1], dim=1) for tensor in (k, v))
    out = attention(scatter_heads(q, group), scatter_heads(k, group), scatter_heads(v, group))
    return gather_heads(out, group)
