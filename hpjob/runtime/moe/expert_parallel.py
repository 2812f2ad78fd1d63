"""Experts of Mixtral and Qwen3-MoE spread over an expert-parallel group.

transformers' block stays: its router chooses experts and weights, then calls ``block.experts``. Only that module is
replaced, by one with the same call and the same parameter names that holds this rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpjob.core.errors import UserInputError
from hpjob.runtime.moe.dispatch import Routing, combine, dispatch, route
from hpjob.runtime.moe.grouped_linear import grouped_linear
from hpjob.runtime.moe.tensor_parallel_edges import sum_gradients, sum_outputs
from hpjob.runtime.weight_gradients import GradientTarget, WeightGradientQueue


class ExpertParallelExperts(nn.Module):
    """This rank's part of a layer's gated experts.

    Gradients of the experts are sums over the tokens of all ranks of the group; the router's and all other gradients
    are of this rank's tokens and are the caller's to reduce. The ranks of a tensor-parallel group must hold the same
    tokens; each computes its part of every expert's intermediate features.

    Attributes:
        gate_up_proj: Shape (local experts, 2 * local intermediate, hidden), the gate's rows first.
        down_proj: Shape (local experts, hidden, local intermediate).
        queue: Set by a pipeline schedule that computes weight gradients later.

    Args:
        gate_up_proj: This rank's experts, contiguous in the order of ranks.
        down_proj: Likewise.
        act_fn: Activation of the gate.
        group: The expert-parallel ranks.
        tp_group: Ranks that share the intermediate features of these experts; None for whole experts.
    """

    def __init__(
        self,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        act_fn: Callable[[Tensor], Tensor],
        group: dist.ProcessGroup,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(gate_up_proj)
        self.down_proj = nn.Parameter(down_proj)
        self.act_fn = act_fn
        self.num_experts = gate_up_proj.shape[0] * dist.get_world_size(group)
        self.queue: WeightGradientQueue | None = None
        self._group = group
        self._tp_group = tp_group

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sum of the chosen experts' outputs for each token.

        Args:
            hidden_states: Shape (tokens, hidden), this rank's tokens.
            top_k_index: Shape (tokens, top_k), experts chosen by the router.
            top_k_weights: Shape (tokens, top_k).

        Returns:
            Shape (tokens, hidden).
        """
        if self._tp_group is not None:
            hidden_states, top_k_weights = (
                sum_gradients(tensor, self._tp_group) for tensor in (hidden_states, top_k_weights)
            )
        routing = route(top_k_index, self.num_experts, self._group)
        rows = dispatch(hidden_states, routing)
        gate, up = self._multiply(rows, self.gate_up_proj, routing).chunk(2, dim=-1)
        rows = self._multiply(self.act_fn(gate) * up, self.down_proj, routing)
        out = combine(rows, top_k_weights, routing)
        return out if self._tp_group is None else sum_outputs(out, self._tp_group)

    def _multiply(self, rows: Tensor, parameter: nn.Parameter, routing: Routing) -> Tensor:
        defer = None if self.queue is None else self.queue.defer_for([GradientTarget(parameter)])
        return grouped_linear(rows, parameter, routing.rows_per_expert, defer, routing.offsets)


def expert_modules(module: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Experts of transformers' mixture-of-experts blocks inside ``module``: parent, attribute name, experts."""
    for parent in module.modules():
        for name, child in parent.named_children():
            weights = dict(child.named_parameters(recurse=False))
            if set(weights) == {"gate_up_proj", "down_proj"} and all(weight.dim() == 3 for weight in weights.values()):
                yield parent, name, child


def check_ep_size(num_experts: int, ep_size: int) -> None:
    """Refuse groups over which the experts cannot be spread evenly.

    Raises:
        UserInputError: ``num_experts`` is no multiple of ``ep_size``.
    """
    if num_experts % ep_size:
        divisors = [str(n) for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise UserInputError(
            f"{num_experts} experts cannot be spread evenly over ep_size {ep_size}",
            hint=f"choose parallel.ep_size from {', '.join(divisors)}",
        )


def shard_experts(
    experts: Any, group: dist.ProcessGroup, tp_group: dist.ProcessGroup | None = None
) -> ExpertParallelExperts:
    """This rank's part of a transformers experts module, on whatever device (meta included) its weights are.

    Raises:
        UserInputError: The experts, or the features of each, cannot be divided evenly.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    check_ep_size(experts.gate_up_proj.shape[0], size)
    gate_up, down = (weight.detach().chunk(size)[rank] for weight in (experts.gate_up_proj, experts.down_proj))
    if tp_group is not None:
        tp_size, tp_rank = dist.get_world_size(tp_group), dist.get_rank(tp_group)
        if down.shape[2] % tp_size:
            raise UserInputError(
                f"experts with {down.shape[2]} intermediate features cannot be divided over tp_size {tp_size}",
                hint="choose a tp_size that divides the experts' intermediate size",
            )
        halves = [half.chunk(tp_size, dim=1)[tp_rank] for half in gate_up.chunk(2, dim=1)]
        gate_up, down = torch.cat(halves, dim=1), down.chunk(tp_size, dim=2)[tp_rank]
    return ExpertParallelExperts(gate_up.clone(), down.contiguous().clone(), experts.act_fn, group, tp_group)


def replace_experts(module: nn.Module, group: dist.ProcessGroup, tp_group: dist.ProcessGroup | None = None) -> int:
    """Spread the experts of every mixture-of-experts block inside ``module`` over ``group``.

    Returns:
        Number of blocks changed.

    Raises:
        UserInputError: There is no such block, or its experts cannot be divided evenly.
    """
    found = list(expert_modules(module))
    for parent, name, experts in found:
        setattr(parent, name, shard_experts(experts, group, tp_group))
    if not found:
        raise UserInputError(
            f"{type(module).__name__} has no mixture-of-experts block that hpjob knows",
            hint="set parallel.ep_size to 1, or use Mixtral or Qwen3-MoE",
        )
    return len(found)
