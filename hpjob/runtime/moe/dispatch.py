"""Tokens to the ranks of their experts and back, by all-to-all with uneven parts.

The order is deterministic: a rank receives by sending rank, and from each rank by expert and then by token; before
the experts run the rows are put in the order of experts. No sum depends on the order of arrival.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Where the rows of one batch of tokens go. A row is one token for one of its experts.

    Attributes:
        group: The expert-parallel ranks; experts lie on them in contiguous, equal parts.
        top_k: Rows per token.
        to_expert_order: Shape (rows,); row i after sorting by expert was row ``to_expert_order[i]``.
        sent: Rows sent to each rank.
        received: Rows received from each rank.
        to_local_order: Shape (received rows,); from order of arrival to order of local experts.
        rows_per_expert: Received rows of each local expert.
        offsets: Shape (local experts,), int32: where the rows of each end; on the device.
    """

    group: dist.ProcessGroup
    top_k: int
    to_expert_order: Tensor
    sent: list[int]
    received: list[int]
    to_local_order: Tensor
    rows_per_expert: list[int]
    offsets: Tensor


def route(expert_indices: Tensor, num_experts: int, group: dist.ProcessGroup) -> Routing:
    """Agree with all ranks on who sends how many rows to which expert.

    Args:
        expert_indices: Shape (tokens, top_k), int64, as the router chose them.
        num_experts: Experts of the layer, a multiple of the group size.
        group: The expert-parallel ranks.

    Returns:
        The routing. The host waits for the device once here: sizes of messages are host numbers.
    """
    size = dist.get_world_size(group)
    num_local = num_experts // size
    rows = expert_indices.reshape(-1)
    to_expert_order = torch.argsort(rows, stable=True)
    sent_counts = torch.zeros(num_experts, dtype=torch.int64, device=rows.device)
    sent_counts.scatter_add_(0, rows, torch.ones_like(rows))
    # Under the fake process group of a rehearsal nothing arrives: all ranks then count as routing like this one.
    received_counts = sent_counts.clone()
    dist.all_to_all_single(received_counts, sent_counts, group=group)
    counts = torch.stack((sent_counts, received_counts)).view(2, size, num_local).tolist()
    sent, received = ([sum(row) for row in counts[direction]] for direction in (0, 1))
    expert_of_arrival = torch.repeat_interleave(
        torch.arange(num_local, device=rows.device).repeat(size), received_counts, output_size=sum(received)
    )
    return Routing(
        group=group,
        top_k=expert_indices.shape[1],
        to_expert_order=to_expert_order,
        sent=sent,
        received=received,
        to_local_order=torch.argsort(expert_of_arrival, stable=True),
        rows_per_expert=[sum(counts[1][rank][expert] for rank in range(size)) for expert in range(num_local)],
        offsets=received_counts.view(size, num_local).sum(0).cumsum(0, dtype=torch.int32),
    )


def _exchange(rows: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


def _inverse(permutation: Tensor) -> Tensor:
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(permutation.numel(), device=permutation.device)
    return inverse


class _Dispatch(torch.autograd.Function):
    """Gathers and sums by permutation, never by atomic additions, so that gradients are reproducible."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        rows = tokens[routing.to_expert_order // routing.top_k]
        return _exchange(rows, routing.group, routing.sent, routing.received)[routing.to_local_order]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        routing: Routing = ctx.routing
        arrived = grad_outputs[0][_inverse(routing.to_local_order)]
        rows = _exchange(arrived, routing.group, routing.received, routing.sent)[_inverse(routing.to_expert_order)]
        tokens = rows.view(-1, routing.top_k, *rows.shape[1:])
        return tokens.sum(1, dtype=torch.promote_types(rows.dtype, torch.float32)).to(rows.dtype), None


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        arrived = rows[_inverse(routing.to_local_order)]
        return _exchange(arrived, routing.group, routing.received, routing.sent)[_inverse(routing.to_expert_order)]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        routing: Routing = ctx.routing
        rows = grad_outputs[0][routing.to_expert_order]
        return _exchange(rows, routing.group, routing.sent, routing.received)[routing.to_local_order], None


def dispatch(tokens: Tensor, routing: Routing) -> Tensor:
    """Rows for this rank's experts, in the order of experts.

    Args:
        tokens: Shape (tokens, hidden), this rank's tokens.
        routing: Of the same tokens.

    Returns:
        Shape (received rows, hidden).
    """
    result: Tensor = _Dispatch.apply(tokens, routing)  # type: ignore[no-untyped-call]
    return result


def combine(rows: Tensor, weights: Tensor, routing: Routing) -> Tensor:
    """Bring the experts' rows home and sum them for each token with the router's weights, in fp32.

    Args:
        rows: Shape (received rows, hidden), in the order of experts.
        weights: Shape (tokens, top_k).
        routing: Of the same tokens.

    Returns:
        Shape (tokens, hidden), dtype of ``rows``.
    """
    home: Tensor = _Return.apply(rows, routing)  # type: ignore[no-untyped-call]
    by_token = home.view(*weights.shape, home.shape[-1])
    dtype = torch.promote_types(rows.dtype, torch.float32)
    return (by_token.to(dtype) * weights.to(dtype).unsqueeze(-1)).sum(1).to(rows.dtype)
