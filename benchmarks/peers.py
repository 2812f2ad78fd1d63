"""What a person would use instead on one GPU: one optimizer step of each, on the same work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hpjob.runtime.parity.case import Case

Step = Callable[[Tensor], Any]
"""Trains on token ids (batch, sequence)."""


def plain_transformers(case: Case, *, compiled: bool) -> Step:
    """transformers' model as a Trainer with bf16 runs it: fp32 weights, autocast, fused AdamW, clipping."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = case.recipe.model
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=case.plan.seq_length,
        attn_implementation="sdpa",
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).float()
    forward: Any = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(tokens: Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward(input_ids=tokens, labels=tokens, use_cache=False).loss
        _finish(model, optimizer, loss)

    return step


def torchtitan(case: Case) -> Step:
    """torchtitan's Llama 3 model, each block compiled, FSDP2 with fp32 shards over all ranks, compiled loss."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    shape = case.recipe.model
    sizes = TransformerModelArgs(
        dim=shape.hidden_size,
        n_layers=shape.num_hidden_layers,
        n_heads=shape.num_attention_heads,
        n_kv_heads=shape.num_key_value_heads,
        vocab_size=shape.vocab_size,
        multiple_of=256,  # 4096 then gives the width of 11,008
        max_seq_len=case.plan.seq_length,
    )
    with torch.device("cuda"):
        model = Transformer(sizes)
    with torch.no_grad():
        model.init_weights()
    for name, block in model.layers.named_children():
        model.layers.register_module(name, torch.compile(block, fullgraph=True))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    loss_of = torch.compile(lambda logits, labels: F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()))

    def step(tokens: Tensor) -> None:
        _finish(model, optimizer, loss_of(model(tokens)[:, :-1], tokens[:, 1:]))

    return step


def _finish(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad()


PEERS: dict[str, Callable[[Case], Step]] = {
    "torchtitan": torchtitan,
    "transformers + torch.compile": lambda case: plain_transformers(case, compiled=True),
    "transformers as the Trainer runs it": lambda case: plain_transformers(case, compiled=False),
}
