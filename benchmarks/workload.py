"""The work that speed is measured on: slices of the Llama-2-7B shape, and what a token of it costs."""

from __future__ import annotations

import time
from collections.abc import Mapping

from hpjob.runtime.parity.case import Case, parse_case

PEAK_TFLOPS = 989.5
"""Dense bf16 peak of an H100 or H200 SXM5 by its data sheet."""

LLAMA_7B: Mapping[str, int] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}
LLAMA3_8B: Mapping[str, int] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
TINY: Mapping[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 320,
}
"""Stands in for the real shape where only the script itself is tried."""


def shape_text(shape: Mapping[str, int], layers: int) -> str:
    """Return a model shape as parity cases write it."""
    return " ".join(f"{key}={value}" for key, value in {**shape, "num_hidden_layers": layers}.items())


def work_case(layout: str, shape: Mapping[str, int], settings: Mapping[str, object], *, world: int) -> Case:
    """Return a layout with a shape and settings, through the recipe and plan that a run has.

    Args:
        layout: Such as ``tp_size=2 zero_stage=0``.
        shape: Model sizes.
        settings: More of a case's keys: layers, sequence, microbatches, precision.
        world: GPUs.
    """
    # A long run on paper, so that no schedule ends inside the measurement.
    pairs = " ".join(f"{key}={value}" for key, value in settings.items())
    return parse_case(f"{layout} {' '.join(f'{k}={v}' for k, v in shape.items())} {pairs}", world=world, steps=1000)


def flops_per_token(case: Case) -> float:
    """Return model FLOPs of one token's forward and backward pass.

    Six for every weight of a matrix product (layers and head; the embedding is a look-up), and causal
    attention once: 2 · s · h forward for the two products over half of the score matrix, three times that
    with the backward pass. Recomputation does not count.
    """
    shape = case.recipe.model
    q = shape.num_attention_heads * shape.attention_head_dim
    kv = shape.num_key_value_heads * shape.attention_head_dim
    experts = shape.num_experts_per_tok or 1
    layer = 2 * shape.hidden_size * (q + kv) + 3 * experts * shape.hidden_size * shape.intermediate_size
    weights = shape.num_hidden_layers * layer + shape.vocab_size * shape.hidden_size
    return 6.0 * weights + 6.0 * shape.num_hidden_layers * q * case.plan.seq_length


def sustained_tflops(seconds: float = 2.0) -> float:
    """Return the rate of a layer's gate-and-up product in bf16 while the card is power-limited."""
    import torch

    tokens, hidden, width = 16384, 4096, 22016
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(width, hidden, device="cuda", dtype=torch.bfloat16) * 0.02
    torch.cuda.synchronize()
    begin, products = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        for _ in range(20):
            x @ w.t()
        products += 20
        torch.cuda.synchronize()
    return products * 2.0 * tokens * hidden * width / (time.perf_counter() - begin) / 1e12
