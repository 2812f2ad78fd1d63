"""Whole decoder layers with experts spread over the ranks that also split the sequence, with recomputation."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hpjob.runtime.moe.expert_parallel import replace_experts
from hpjob.runtime.sequence.attention_interface import install_attention
from tests.runtime.gloo_pool import GlooPool
from tests.runtime.sequence.attention_reference import relative_error
from tests.runtime.sequence.decoder_layers import (
    BATCH,
    HIDDEN,
    LENGTH,
    build_model,
    make_kernel,
    run_layers,
    take,
    whole_sequence,
)


def errors_of_layers(group: dist.ProcessGroup, family: str, mode: str) -> list[float]:
    """Errors of output, input gradient and worst parameter gradient."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    experts = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    model = build_model(family, **experts)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    whole, grad_out = (torch.randn(BATCH, LENGTH, HIDDEN, generator=generator) for _ in range(2))
    allowed = torch.ones(LENGTH, LENGTH).tril().bool()[None, None]

    hidden = whole.clone().requires_grad_()
    expected = whole_sequence(model, hidden, allowed)
    expected.backward(grad_out)
    expected_grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    install_attention(model, make_kernel(mode, group))
    assert replace_experts(model, group) == 2
    local = take(mode, whole, group).clone().requires_grad_()
    positions = take(mode, torch.arange(LENGTH)[None].expand(BATCH, -1), group)
    out = run_layers(model, local, positions, recompute=True)
    out.backward(take(mode, grad_out, group))
    worst = 0.0
    for name, parameter in model.named_parameters():
        if name not in expected_grads:
            continue
        wanted = expected_grads[name]
        if "experts" in name:
            wanted = wanted.chunk(size)[rank]
        else:
            dist.all_reduce(parameter.grad, group=group)
        worst = max(worst, relative_error(parameter.grad, wanted))
    assert local.grad is not None and hidden.grad is not None
    input_error = relative_error(local.grad, take(mode, hidden.grad, group))
    return [relative_error(out, take(mode, expected, group)), input_error, worst]


@pytest.mark.parametrize(("mode", "world"), [("ring_attn", 4), ("all_to_all", 2)])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_layers_match_the_whole_sequence(pool: GlooPool, family: str, mode: str, world: int) -> None:
    for out, input_grad, parameter_grads in pool.run(errors_of_layers, world, family, mode):
        assert out <= 1e-6
        assert input_grad <= 2e-6
        assert parameter_grads <= 2e-6
