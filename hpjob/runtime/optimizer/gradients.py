"""What happens to gradients between the last backward pass and the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hpjob.runtime.model.parameters import ShardedParameter


def sum_gradients(items: Sequence[ShardedParameter], group: dist.ProcessGroup, device: torch.device) -> None:
    """Sum the gradients of some parameters over a group, in one collective, in place.

    Args:
        items: All ranks of the group must hold the same ones, cut the same way; in the host's memory or not.
        group: To sum over.
        device: That the group communicates from.
    """
    _exchange(items, group, device, lambda flat: dist.all_reduce(flat, group=group))


def copy_gradients(items: Sequence[ShardedParameter], group: dist.ProcessGroup, device: torch.device) -> None:
    """Give all ranks of a group the gradients of its first one, in one collective, in place.

    Kernels that are tuned on each rank by itself may round differently, and copies of a weight would part.

    Args:
        items: As of :func:`sum_gradients`.
        group: Whose ranks have copies of them.
        device: That the group communicates from.
    """
    _exchange(items, group, device, lambda flat: dist.broadcast(flat, group=group, group_src=0))


def _exchange(
    items: Sequence[ShardedParameter],
    group: dist.ProcessGroup,
    device: torch.device,
    collective: Callable[[Tensor], object],
) -> None:
    gradients = [gradient for item in items if (gradient := item.local_gradient) is not None]
    if not gradients or group.size() == 1:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients]).float().to(device)
    collective(flat)
    parts = torch.split(flat.to(gradients[0].device), [gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])


def add_gradients(copies: Sequence[ShardedParameter]) -> None:
    """Give all copies of one parameter on this rank the sum of their gradients."""
    gradients = [gradient for item in copies if (gradient := item.local_gradient) is not None]
    total = torch.stack(gradients).sum(0)
    for gradient in gradients:
        gradient.copy_(total)


def local_squared_norm(items: Sequence[ShardedParameter], device: torch.device) -> Tensor:
    """Return the squared norm of the gradients that this rank counts, fp64.

    Summed over all ranks it is the squared norm of the whole model: a parameter that several ranks hold
    is counted by one of them.
    """
    counted = [g for item in items if item.counted and (g := item.local_gradient) is not None and g.numel()]
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(counted, 2, dtype=torch.float32)).double().square().sum().to(device)


def clip(items: Sequence[ShardedParameter], norm: Tensor, max_norm: float, loss_scale: float = 1.0) -> None:
    """Undo the loss scale and bring the global norm of all gradients down to ``max_norm``; 0 = leave it."""
    gradients = [gradient for item in items if (gradient := item.local_gradient) is not None]
    if (max_norm or loss_scale != 1.0) and gradients:
        torch._foreach_mul_(gradients, clip_scale(norm, max_norm, loss_scale).to(gradients[0].device))


def clip_scale(norm: Tensor, max_norm: float, loss_scale: float = 1.0) -> Tensor:
    """Return the factor of the gradients, fp32.

    Args:
        norm: Of all gradients, without the loss scale.
        max_norm: What the norm is brought down to; 0 = nothing is clipped.
        loss_scale: Contained in the gradients.
    """
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
    return (factor / loss_scale).float() if loss_scale != 1.0 else factor.float()
