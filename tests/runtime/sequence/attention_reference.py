"""Plain attention over a whole sequence in fp64, and relative errors against it."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of the expected tensor."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-300))


def make_inputs(shape: tuple[int, int, int, int, int], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output; shape is (batch, heads, kv_heads, sequence, head_dim)."""
    batch, heads, kv_heads, length, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, n, length, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)


def allowed_keys(length: int, document_ids: Tensor | None, sliding_window: int | None) -> Tensor:
    """Causal mask with documents and window, shape (batch or 1, 1, length, length)."""
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    allowed = (distance >= 0)[None, None]
    if sliding_window is not None:
        allowed = allowed & (distance < sliding_window)
    if document_ids is not None:
        allowed = allowed & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    return allowed


def full_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    document_ids: Tensor | None = None,
    sliding_window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output and gradients of q, k, v in fp64."""
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    groups = q.shape[1] // k.shape[1]
    key, value = leaves[1].repeat_interleave(groups, 1), leaves[2].repeat_interleave(groups, 1)
    scores = leaves[0] @ key.transpose(-2, -1) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~allowed_keys(q.shape[2], document_ids, sliding_window), -torch.inf)
    out = scores.softmax(-1) @ value
    grads = torch.autograd.grad(out, leaves, grad_out.double())
    return out.detach(), *grads
