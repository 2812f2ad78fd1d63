"""The attention kernel of a plan, and its recomputation in the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hpjob.plan.model import Axis, Plan
from hpjob.runtime.mesh import Mesh
from hpjob.runtime.sequence.attention_interface import (
    AttentionKernel,
    LocalAttentionKernel,
    RingAttentionKernel,
    UlyssesAttentionKernel,
)
from hpjob.runtime.sequence.peer_post import peer_posts
from hpjob.runtime.sequence.ring import Ring


class RecomputedAttention:
    """Keeps q, k and v instead of what the kernel saves, and runs the kernel again in the backward pass.

    Args:
        kernel: What computes.
    """

    def __init__(self, kernel: AttentionKernel) -> None:
        self._kernel = kernel
        self.name = kernel.name

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None,
        document_ids: Tensor | None,
        sliding_window: int | None,
    ) -> Tensor:
        settings: dict[str, Any] = {"scale": scale, "document_ids": document_ids, "sliding_window": sliding_window}
        if not torch.is_grad_enabled():
            return self._kernel(q, k, v, **settings)
        output: Tensor = checkpoint(self._kernel, q, k, v, use_reentrant=False, preserve_rng_state=False, **settings)
        return output

    def describe(self, q: Tensor, k: Tensor, *, needs_bias: bool = False) -> str:
        return f"{self._kernel.describe(q, k, needs_bias=needs_bias)}, recomputed"


def _ring(plan: Plan, mesh: Mesh, device: torch.device) -> Ring:
    """One ring, or where it spans nodes, rings inside them and one around them."""
    group, size = mesh.group(Axis.SP), mesh.size(Axis.SP)
    inside, rest = divmod(plan.gpus_per_node, plan.degrees.tp)
    if rest or not 1 < inside < size or size % inside:
        visitor_post, sum_post = peer_posts(group, device, 2) or (None, None)
        return Ring(group=group, visitor_post=visitor_post, sum_post=sum_post)
    (outer_group,) = mesh.message_groups(Axis.SP, 1)
    return Ring(group=group, inner_size=inside, outer_group=outer_group)


def attention_kernel(plan: Plan, mesh: Mesh, device: torch.device) -> AttentionKernel:
    """Return the kernel of a plan's sequence parallelism mode; a collective call, one object serves all layers."""
    kernel: AttentionKernel = LocalAttentionKernel()
    if plan.sequence_parallelism_mode == "ring_attn":
        kernel = RingAttentionKernel(_ring(plan, mesh, device))
    elif plan.sequence_parallelism_mode == "all_to_all":
        kernel = UlyssesAttentionKernel(mesh.group(Axis.SP))
    return RecomputedAttention(kernel) if plan.recompute == "selective" else kernel
