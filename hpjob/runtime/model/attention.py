"""Our attention function, chosen by decoder layers through transformers' attention interface."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION_NAME = "hpjob"
RECOMPUTE_ATTRIBUTE = "hpjob_recompute_attention"
"""Set on an attention module whose softmax part is recomputed in the backward pass."""


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Causal attention through SDPA.

    Args:
        module: The attention module that calls.
        query: (batch, this rank's query heads, seq, head_dim).
        key: (batch, this rank's key-value heads, seq, head_dim).
        value: Same shape as ``key``.
        attention_mask: None = causal.
        kwargs: ``scaling``, ``dropout`` and others of transformers' interface.

    Returns:
        The output as (batch, seq, heads, head_dim), and None for the weights.
    """
    if getattr(module, RECOMPUTE_ATTRIBUTE, False) and module.training:
        output: tuple[Tensor, None] = checkpoint(
            sdpa_attention_forward,
            module,
            query,
            key,
            value,
            attention_mask,
            use_reentrant=False,
            preserve_rng_state=False,
            **kwargs,
        )
        return output
    result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return result


AttentionInterface.register(ATTENTION_NAME, attention_forward)
