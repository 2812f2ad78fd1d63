"""Attention of one block of queries to one block of keys, with the log-sum-exp that merging blocks needs.

``backward`` takes the output and the log-sum-exp of the *whole* row, not of the block. The kernels of
FlashAttention form their probabilities as ``exp(score - log_sum_exp)``, so a block's gradient comes out right
without recomputing any statistics of the other blocks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSettings:
    """How the scores of a block are scaled and masked.

    Attributes:
        scale: Factor of the scores.
        is_causal: For blocks with as many queries as keys, in the same order; excludes a bias.
        bias: Shape (batch or 1, 1, queries, keys), added to the scaled scores.
    """

    scale: float
    is_causal: bool = False
    bias: Tensor | None = None


class AttentionBackend(ABC):
    """One way to compute a block.

    Shapes: q, out and grad_out (batch, heads, queries, head_dim); k and v (batch, kv_heads, keys, head_dim) with
    kv_heads a divisor of heads; lse (batch, heads, queries) in fp32 (fp64 for fp64 input of the math backend).
    """

    name: str
    supports_bias: bool = True
    native_gqa: bool = False
    """Takes fewer kv heads than heads; otherwise the heads of this one block are repeated here, never in a message."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, settings: BlockSettings) -> tuple[Tensor, Tensor]:
        """Output of the block and log-sum-exp of its scores."""
        k, v = self._expand(q, k, v)
        return self._forward(q, k, v, settings)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, settings: BlockSettings
    ) -> Gradients:
        """Gradients of q, k and v of this block, from the whole rows' ``out`` and ``lse``."""
        key, value = self._expand(q, k, v)
        grad_q, grad_k, grad_v = self._backward(grad_out, q, key, value, out, lse, settings)
        if key.shape[1] != k.shape[1]:
            # fp32: the sum over a group of heads is part of the matrix product, not of the stored gradient.
            dtype = torch.promote_types(k.dtype, torch.float32)
            grad_k = group_heads(grad_k, k.shape[1]).sum(2, dtype=dtype)
            grad_v = group_heads(grad_v, k.shape[1]).sum(2, dtype=dtype)
        return grad_q, grad_k, grad_v

    def _expand(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        groups = q.shape[1] // k.shape[1]
        if self.native_gqa or groups == 1:
            return k, v
        return k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, settings: BlockSettings) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, settings: BlockSettings
    ) -> Gradients: ...


class MathBackend(AttentionBackend):
    """Matrix products and softmax in fp32 (fp64 for fp64 input) on any device; stores queries x keys scores."""

    name = "math"
    native_gqa = True

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, settings: BlockSettings) -> tuple[Tensor, Tensor]:
        scores = _grouped_scores(q, k, settings)
        lse = scores.logsumexp(dim=-1)
        out = torch.exp(scores - lse[..., None]) @ v.to(scores.dtype).unsqueeze(2)
        return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)

    def _backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, settings: BlockSettings
    ) -> Gradients:
        scores = _grouped_scores(q, k, settings)
        dtype, kv_heads = scores.dtype, k.shape[1]
        probabilities = torch.exp(scores - group_heads(lse, kv_heads)[..., None])
        grad = group_heads(grad_out.to(dtype), kv_heads)
        row_dot = group_heads((grad_out.to(dtype) * out.to(dtype)).sum(-1), kv_heads)
        grad_v = (probabilities.transpose(-2, -1) @ grad).sum(2)
        grad_probabilities = grad @ v.to(dtype).unsqueeze(2).transpose(-2, -1)
        grad_scores = probabilities * (grad_probabilities - row_dot[..., None]) * settings.scale
        grad_q = grad_scores @ k.to(dtype).unsqueeze(2)
        grad_k = (grad_scores.transpose(-2, -1) @ group_heads(q.to(dtype), kv_heads)).sum(2)
        return grad_q.flatten(1, 2), grad_k, grad_v


def group_heads(tensor: Tensor, kv_heads: int) -> Tensor:
    """(batch, heads, …) as (batch, kv_heads, heads / kv_heads, …)."""
    return tensor.reshape(tensor.shape[0], kv_heads, tensor.shape[1] // kv_heads, *tensor.shape[2:])


def _grouped_scores(q: Tensor, k: Tensor, settings: BlockSettings) -> Tensor:
    """Scaled and masked scores, shape (batch, kv_heads, heads / kv_heads, queries, keys)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries = group_heads(q.to(dtype), k.shape[1])
    scores: Tensor = (queries @ k.to(dtype).unsqueeze(2).transpose(-2, -1)) * settings.scale
    if settings.is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    if settings.bias is not None:
        scores = scores + settings.bias.to(dtype).unsqueeze(2)
    return scores


class CpuFlashBackend(AttentionBackend):
    """The tiled CPU kernel of ``scaled_dot_product_attention``."""

    name = "cpu flash SDPA"

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, settings: BlockSettings) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, settings.is_causal, attn_mask=settings.bias, scale=settings.scale
        )
        return out, lse

    def _backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, settings: BlockSettings
    ) -> Gradients:
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, settings.is_causal, attn_mask=settings.bias, scale=settings.scale
        )
        return grad_q, grad_k, grad_v


def has_cpu_flash() -> bool:
    """Whether this torch has the CPU kernel with its backward."""
    return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward")
