"""Causal attention over a sequence that lies whole on this rank: flash-attn's kernel, else what SDPA takes."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hpjob.runtime.sequence.backend_choice import choose_backend
from hpjob.runtime.sequence.cuda_attention import FlashAttnPackageBackend
from hpjob.runtime.sequence.flash_attn_4 import FlashAttn4Backend, flash_attn_4
from hpjob.runtime.sequence.sequence_mask import sequence_mask


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    document_ids: Tensor | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention by flash-attn where ``choose_backend`` names it, else by SDPA.

    SDPA is left to choose by itself, which it does as ``choose_backend`` predicts: a context that names
    its kernel made compiled layers up to a tenth slower, whatever it named.

    Args:
        q: Shape (batch, heads, sequence, head_dim).
        k: Shape (batch, kv_heads, sequence, head_dim).
        v: Shape of ``k``.
        scale: Factor of the scores; 1 / sqrt(head_dim) by default.
        document_ids: Shape (batch, sequence); tokens see only their own document.
        sliding_window: Newest keys that a query sees, itself included.

    Returns:
        Shape and dtype of ``q``.
    """
    mask = sequence_mask(document_ids, sliding_window, q.shape[2])
    backend = choose_backend(q, k, needs_bias=mask is not None).backend
    if isinstance(backend, FlashAttn4Backend):
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        rows: Tensor = flash_attn_4(*(tensor.transpose(1, 2) for tensor in (q, k, v)), factor, True)[0]
        return rows.transpose(1, 2)
    if isinstance(backend, FlashAttnPackageBackend):
        flash_attn: Any = importlib.import_module("flash_attn")
        heads_last = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out: Tensor = flash_attn.flash_attn_func(*heads_last, softmax_scale=scale, causal=True)
        return out.transpose(1, 2)
    bias = None
    if mask is not None:
        position = torch.arange(q.shape[2], device=q.device)
        bias = mask.bias(position, position, q.dtype)
        if q.device.type == "cuda" and q.shape[1] != k.shape[1]:
            # The kernel that surely takes a bias wants as many heads; plain math would hold all scores.
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=bias is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
