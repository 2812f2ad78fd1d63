"""Decoder layers of transformers with our attention, against the same layers on the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpjob.core.errors import UserInputError
from hpjob.runtime.sequence.attention_interface import (
    LocalAttentionKernel,
    describe_attention,
    install_attention,
)
from tests.runtime.gloo_pool import GlooPool
from tests.runtime.sequence.attention_reference import relative_error
from tests.runtime.sequence.decoder_layers import (
    BATCH,
    LENGTH,
    build_model,
    make_kernel,
    run_layers,
    take,
    whole_sequence,
)

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma"]


def errors_of_layers(
    group: dist.ProcessGroup, family: str, mode: str, packed: bool = False, recompute: bool = False, window: Any = None
) -> list[float]:
    """Errors of output, input gradient and worst parameter gradient."""
    model = build_model(family, **({"sliding_window": window} if window else {}))
    whole = torch.randn(BATCH, LENGTH, 32, generator=torch.Generator().manual_seed(2))
    grad_out = torch.randn(BATCH, LENGTH, 32, generator=torch.Generator().manual_seed(3))
    ids = torch.arange(LENGTH).ge(10).long().expand(BATCH, -1) if packed else torch.zeros(BATCH, LENGTH).long()
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    allowed = (distance >= 0) & (ids[:, :, None] == ids[:, None]) & (distance < (window or LENGTH))

    hidden = whole.clone().requires_grad_()
    expected = whole_sequence(model, hidden, allowed[:, None])
    expected.backward(grad_out)
    expected_grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    expected_input_grad = hidden.grad
    assert expected_input_grad is not None
    model.zero_grad()

    assert install_attention(model, make_kernel(mode, group)) == 2
    local = take(mode, whole, group).clone().requires_grad_()
    positions = take(mode, torch.arange(LENGTH)[None].expand(BATCH, -1), group)
    extra = {"document_ids": ids} if packed else {}
    out = run_layers(model, local, positions, recompute, **extra)
    out.backward(take(mode, grad_out, group))
    worst = 0.0
    for name, parameter in model.named_parameters():
        if name in expected_grads:
            assert parameter.grad is not None
            if mode != "sdpa":
                dist.all_reduce(parameter.grad, group=group)
            worst = max(worst, relative_error(parameter.grad, expected_grads[name]))
    assert local.grad is not None
    return [
        relative_error(out.detach(), take(mode, expected.detach(), group)),
        relative_error(local.grad, take(mode, expected_input_grad, group)),
        worst,
    ]


def check(errors_of_ranks: list[list[float]]) -> None:
    for out, input_grad, parameter_grads in errors_of_ranks:
        assert out <= 1e-6
        assert input_grad <= 2e-6
        assert parameter_grads <= 5e-6


@pytest.mark.parametrize("mode", ["ring_attn", "all_to_all", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_match_the_whole_sequence(pool: GlooPool, family: str, mode: str) -> None:
    check(pool.run(errors_of_layers, 1 if mode == "sdpa" else 2, family, mode))


@pytest.mark.parametrize("mode", ["ring_attn", "all_to_all", "sdpa"])
def test_packed_documents(pool: GlooPool, mode: str) -> None:
    check(pool.run(errors_of_layers, 4 if mode == "all_to_all" else 2, "llama", mode, True))


@pytest.mark.parametrize("mode", ["ring_attn", "all_to_all"])
def test_recomputation_repeats_the_same_messages(pool: GlooPool, mode: str) -> None:
    check(pool.run(errors_of_layers, 4, "llama", mode, False, True))


@pytest.mark.parametrize("mode", ["ring_attn", "all_to_all", "sdpa"])
def test_sliding_window_of_mistral(pool: GlooPool, mode: str) -> None:
    check(pool.run(errors_of_layers, 2, "mistral", mode, False, False, 5))


def test_kernel_is_reported() -> None:
    model = build_model("llama")
    install_attention(model, LocalAttentionKernel())
    text = describe_attention(model, torch.float32, torch.device("cpu"))
    assert text == "sdpa: cpu flash SDPA (tensors on the CPU)"


def descriptions(group: dist.ProcessGroup) -> list[str]:
    texts = []
    for mode in ("ring_attn", "all_to_all"):
        model = build_model("llama")
        install_attention(model, make_kernel(mode, group))
        assert model.config._attn_implementation == f"hpjob_{mode}"
        texts.append(describe_attention(model, torch.bfloat16, torch.device("cpu")))
    return texts


def test_sequence_parallel_kernels_are_reported(pool: GlooPool) -> None:
    inside = "cpu flash SDPA (tensors on the CPU)"
    assert pool.run(descriptions, 2)[0] == [
        f"ring_attn: zigzag ring over 2 ranks, {inside}",
        f"all_to_all: all-to-all over 2 ranks, {inside}",
    ]


def test_two_models_keep_their_own_kernels() -> None:
    first, second = build_model("llama"), build_model("llama")
    kernels = LocalAttentionKernel(), LocalAttentionKernel()
    install_attention(first, kernels[0])
    install_attention(second, kernels[1])
    assert first.layers[0].self_attn.hpjob_attention_kernel is kernels[0]
    assert second.layers[0].self_attn.hpjob_attention_kernel is kernels[1]


@pytest.mark.parametrize(
    ("changes", "extra", "wish"),
    [
        ({"attention_dropout": 0.1}, {}, "attention dropout 0.1"),
        ({}, {"attention_mask": torch.zeros(BATCH, 1, LENGTH, LENGTH)}, "an attention mask"),
        ({}, {"softcap": 30.0}, "soft-capped scores"),
        ({}, {"is_causal": False}, "attention to later tokens"),
    ],
)
def test_what_the_kernels_do_not_do_is_refused(changes: dict[str, Any], extra: dict[str, Any], wish: str) -> None:
    model = build_model("llama", **changes).train()
    install_attention(model, LocalAttentionKernel())
    hidden = torch.randn(BATCH, LENGTH, 32)
    rotary = model.rotary_emb(hidden, position_ids=torch.arange(LENGTH)[None])
    with pytest.raises(UserInputError, match=wish):
        model.layers[0](hidden, position_embeddings=rotary, **{"attention_mask": None, **extra})


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(UserInputError, match="no attention module"):
        install_attention(torch.nn.Linear(2, 2), LocalAttentionKernel())


def test_a_layer_compiles_without_a_graph_break() -> None:
    model = build_model("llama")
    install_attention(model, LocalAttentionKernel())
    layer = model.layers[0]
    positions = torch.arange(LENGTH)[None].expand(BATCH, -1)

    def output_and_gradient() -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.ones(BATCH, LENGTH, 32).cumsum(1).div(LENGTH).requires_grad_()
        rotary = model.rotary_emb(hidden, position_ids=positions)
        out = layer(hidden, attention_mask=None, position_embeddings=rotary, use_cache=False)
        return out, torch.autograd.grad(out.square().sum(), hidden)[0]

    expected = output_and_gradient()
    layer.compile(fullgraph=True, backend="eager")
    for actual, wanted in zip(output_and_gradient(), expected, strict=True):
        assert relative_error(actual, wanted) <= 1e-6


def errors_of_compiled_layer(group: dist.ProcessGroup, mode: str, packed: bool) -> list[float]:
    """A layer compiled as one graph against the same layer not compiled: output and input gradient."""
    model = build_model("llama")
    install_attention(model, make_kernel(mode, group))
    layer = model.layers[0]
    whole = torch.randn(BATCH, LENGTH, 32, generator=torch.Generator().manual_seed(2))
    positions = take(mode, torch.arange(LENGTH)[None].expand(BATCH, -1), group)
    extra = {"document_ids": torch.arange(LENGTH).ge(10).long().expand(BATCH, -1)} if packed else {}

    def output_and_gradient() -> tuple[torch.Tensor, torch.Tensor]:
        hidden = take(mode, whole, group).clone().requires_grad_()
        rotary = model.rotary_emb(hidden, position_ids=positions)
        out = layer(hidden, attention_mask=None, position_embeddings=rotary, use_cache=False, **extra)
        return out.detach(), torch.autograd.grad(out.square().sum(), hidden)[0]

    expected = output_and_gradient()
    layer.compile(fullgraph=True, backend="aot_eager")
    return [relative_error(a, e) for a, e in zip(output_and_gradient(), expected, strict=True)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
def test_layers_compile_with_their_messages(pool: GlooPool, mode: str, packed: bool) -> None:
    assert max(max(errors) for errors in pool.run(errors_of_compiled_layer, 2, mode, packed)) <= 1e-6
