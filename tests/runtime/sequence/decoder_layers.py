"""Small models whose decoder layers run on one rank's part of a sequence or on the whole of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from hpjob.runtime.sequence.attention_interface import (
    LocalAttentionKernel,
    RingAttentionKernel,
    UlyssesAttentionKernel,
)
from hpjob.runtime.sequence.ring import Ring
from hpjob.runtime.sequence.zigzag import zigzag_split

BATCH, LENGTH, HIDDEN = 2, 24, 32


def build_model(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModel

    settings: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 50,
        "use_cache": False,
        **changes,
    }
    torch.manual_seed(1)
    return AutoModel.from_config(AutoConfig.for_model(family, **settings), attn_implementation="eager")


def run_layers(model: Any, hidden: torch.Tensor, position_ids: torch.Tensor, recompute: bool, **extra: Any) -> Any:
    """The decoder layers with explicit positions, as a pipeline stage calls them."""
    rotary = model.rotary_emb(hidden, position_ids=position_ids)
    for layer in model.layers:

        def call(value: torch.Tensor, layer: Any = layer) -> torch.Tensor:
            return layer(
                value,
                attention_mask=None,
                position_ids=position_ids,
                position_embeddings=rotary,
                use_cache=False,
                **extra,
            )

        hidden = checkpoint(call, hidden, use_reentrant=False) if recompute else call(hidden)
    return hidden


def whole_sequence(model: Any, hidden: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """The same layers in eager attention with a mask."""
    position_ids = torch.arange(LENGTH)[None].expand(BATCH, -1)
    rotary = model.rotary_emb(hidden, position_ids=position_ids)
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
    for layer in model.layers:
        hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary, use_cache=False)
    return hidden


def make_kernel(mode: str, group: dist.ProcessGroup) -> Any:
    if mode == "ring_attn":
        return RingAttentionKernel(Ring(group=group))
    return UlyssesAttentionKernel(group) if mode == "all_to_all" else LocalAttentionKernel()


def take(mode: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if mode == "ring_attn":
        return zigzag_split(tensor, rank, size)
    return tensor if mode == "sdpa" else tensor.chunk(size, dim=1)[rank].contiguous()
