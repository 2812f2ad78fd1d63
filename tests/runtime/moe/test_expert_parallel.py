"""Expert parallelism inside transformers' Mixtral and Qwen3-MoE blocks, against the same block in one process."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from hpjob.core.errors import UserInputError
from hpjob.runtime.moe import grouped_linear as grouped_linear_module
from hpjob.runtime.moe.dispatch import dispatch, route
from hpjob.runtime.moe.expert_parallel import ExpertParallelExperts, check_ep_size, replace_experts
from hpjob.runtime.moe.grouped_linear import grouped_linear
from hpjob.runtime.weight_gradients import WeightGradientQueue
from tests.runtime.gloo_pool import GlooPool

HIDDEN, EXPERTS, TOP_K, INTERMEDIATE = 16, 8, 2, 12
BATCH, LENGTH = 2, 7
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-300))


def build_block(family: str) -> Any:
    from transformers import AutoConfig

    settings = {
        "hidden_size": HIDDEN,
        "num_local_experts": EXPERTS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "intermediate_size": INTERMEDIATE,
        "moe_intermediate_size": INTERMEDIATE,
        "norm_topk_prob": True,
    }
    config = AutoConfig.for_model(family, **settings)
    config._experts_implementation = "eager"
    if family == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock as Block
    else:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Block
    block = Block(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return block.double().float()


def inputs(rank: int, routing: str) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's tokens (a different number on each rank) and the gradient of their outputs."""
    generator = torch.Generator().manual_seed(100 + rank)
    length = 1 if routing == "few tokens" else LENGTH + rank
    shape = (BATCH, length, HIDDEN)
    tokens, grad_out = (torch.randn(shape, generator=generator) for _ in range(2))
    if routing == "one rank":
        tokens[..., 0] = 5.0
    return tokens, grad_out


def bias_router(block: Any, routing: str) -> None:
    """Make every token choose experts 5 and 4, which share a rank, through the feature that ``inputs`` set."""
    if routing == "one rank":
        with torch.no_grad():
            block.gate.weight[:, 0] = -2.0
            block.gate.weight[4:6, 0] = 1.0


def expected_of_all_ranks(family: str, size: int, routing: str) -> tuple[list[tuple[Any, Any]], dict[str, Any]]:
    """One process in fp64: output and input gradient for each rank's tokens, parameter gradients of all together."""
    block = build_block(family)
    bias_router(block, routing)
    block = block.double()
    results = []
    for rank in range(size):
        tokens, grad_out = inputs(rank, routing)
        leaf = tokens.double().requires_grad_()
        out = block(leaf)
        out.backward(grad_out.double())
        results.append((out, leaf.grad))
    return results, {name: parameter.grad for name, parameter in block.named_parameters()}


def errors_of_block(group: dist.ProcessGroup, family: str, routing: str, manner: str = "plain") -> dict[str, float]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    results, grads = expected_of_all_ranks(family, size, routing)
    block = build_block(family)
    bias_router(block, routing)
    assert replace_experts(block, group) == 1
    tokens, grad_out = inputs(rank, routing)
    leaf = tokens.requires_grad_()
    queue = WeightGradientQueue()
    if manner == "deferred":
        block.experts.queue = queue
    out = checkpoint(block, leaf, use_reentrant=False) if manner == "recomputed" else block(leaf)
    out.backward(grad_out)
    if manner == "deferred":
        assert block.experts.gate_up_proj.grad is None
        queue.run(0)
    assert leaf.grad is not None
    errors = {"out": relative_error(out, results[rank][0]), "tokens": relative_error(leaf.grad, results[rank][1])}
    router_grad = block.gate.weight.grad.clone()
    dist.all_reduce(router_grad, group=group)
    errors["router"] = relative_error(router_grad, grads["gate.weight"])
    for name in ("gate_up_proj", "down_proj"):
        actual = getattr(block.experts, name).grad
        assert actual is not None
        expected = grads[f"experts.{name}"].chunk(size)[rank]
        for expert in range(EXPERTS // size):
            if not expected[expert].any():
                assert not actual[expert].any()
        errors[name] = relative_error(actual, expected) if expected.any() else 0.0
    return errors


@pytest.mark.parametrize("routing", ["spread", "one rank", "few tokens"])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_outputs_and_all_gradients_match_one_process(pool: GlooPool, family: str, world: int, routing: str) -> None:
    for errors in pool.run(errors_of_block, world, family, routing):
        assert max(errors.values()) <= 1e-6, errors


@pytest.mark.parametrize("manner", ["deferred", "recomputed"])
@pytest.mark.parametrize("routing", ["spread", "one rank"])
def test_gradients_deferred_or_from_recomputation(pool: GlooPool, routing: str, manner: str) -> None:
    for errors in pool.run(errors_of_block, 4, "qwen3_moe", routing, manner):
        assert max(errors.values()) <= 1e-6, errors


def errors_of_single_expert(group: dist.ProcessGroup) -> list[float]:
    """Every token of every rank goes to expert 3 alone."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    block = build_block("mixtral")
    tokens, weights = torch.randn(6, HIDDEN, requires_grad=True), torch.rand(6, 1, requires_grad=True)
    choice = torch.full((6, 1), 3)
    expected = block.experts(tokens, choice, weights)
    leaves = (tokens, weights)
    expected_grads = torch.autograd.grad(expected.square().sum(), (*leaves, block.experts.down_proj))
    replace_experts(block, group)
    actual = block.experts(tokens, choice, weights)
    grads = torch.autograd.grad(actual.square().sum(), (*leaves, block.experts.down_proj))
    pairs = [(actual, expected), *zip(grads[:2], expected_grads[:2], strict=True)]
    if rank == 3 * size // EXPERTS:
        pairs.append((grads[2], size * expected_grads[2].chunk(size)[rank]))
    else:
        assert not grads[2].any()
    return [relative_error(a, e) for a, e in pairs]


def test_all_tokens_to_one_expert(pool: GlooPool) -> None:
    for errors in pool.run(errors_of_single_expert, 4):
        assert max(errors) <= 1e-6


def errors_with_tensor_parallel(group: dist.ProcessGroup, family: str) -> dict[str, float]:
    """ep 2 by tp 2 on four ranks: rank = 2 * ep rank + tp rank."""
    rank = dist.get_rank(group)
    ep_rank, tp_rank = divmod(rank, 2)
    ep_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tp_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    results, grads = expected_of_all_ranks(family, 2, "spread")
    block = build_block(family)
    replace_experts(block, ep_groups[tp_rank], tp_groups[ep_rank])
    tokens, grad_out = inputs(ep_rank, "spread")
    leaf = tokens.requires_grad_()
    out = block(leaf)
    out.backward(grad_out)
    router_grad = block.gate.weight.grad.clone()
    dist.all_reduce(router_grad, group=ep_groups[tp_rank])
    gate_up, down = (grads[f"experts.{name}"].chunk(2)[ep_rank] for name in ("gate_up_proj", "down_proj"))
    gate_up = torch.cat([half.chunk(2, 1)[tp_rank] for half in gate_up.chunk(2, 1)], 1)
    assert leaf.grad is not None
    return {
        "out": relative_error(out, results[ep_rank][0]),
        "tokens": relative_error(leaf.grad, results[ep_rank][1]),
        "router": relative_error(router_grad, grads["gate.weight"]),
        "gate_up_proj": relative_error(block.experts.gate_up_proj.grad, gate_up),
        "down_proj": relative_error(block.experts.down_proj.grad, down.chunk(2, 2)[tp_rank]),
    }


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_divided_over_tensor_parallel_ranks_too(pool: GlooPool, family: str) -> None:
    for errors in pool.run(errors_with_tensor_parallel, 4, family):
        assert max(errors.values()) <= 1e-6, errors


def bf16_errors(group: dist.ProcessGroup) -> dict[str, float]:
    rank = dist.get_rank(group)
    whole = build_block("mixtral").bfloat16()
    block = build_block("mixtral").bfloat16()
    replace_experts(block, group)
    tokens, grad_out = (tensor.bfloat16() for tensor in inputs(rank, "spread"))
    leaves = tokens.clone().requires_grad_(), tokens.clone().requires_grad_()
    outs = block(leaves[0]), whole(leaves[1])
    for out in outs:
        out.backward(grad_out)
    assert leaves[0].grad is not None and leaves[1].grad is not None
    return {"out": relative_error(*outs), "tokens": relative_error(leaves[0].grad, leaves[1].grad)}


def test_bf16_stays_within_its_rounding(pool: GlooPool) -> None:
    for errors in pool.run(bf16_errors, 4):
        assert max(errors.values()) <= 1e-2, errors


def two_runs_are_equal(group: dist.ProcessGroup) -> bool:
    outcomes = []
    for _ in range(2):
        block = build_block("qwen3_moe")
        replace_experts(block, group)
        tokens, grad_out = inputs(dist.get_rank(group), "spread")
        leaf = tokens.requires_grad_()
        out = block(leaf)
        out.backward(grad_out)
        outcomes.append([out.detach(), leaf.grad, block.experts.gate_up_proj.grad, block.experts.down_proj.grad])
    return all(torch.equal(first, second) for first, second in zip(*outcomes, strict=True))


def test_same_bits_each_time(pool: GlooPool) -> None:
    assert pool.run(two_runs_are_equal, 4) == [True] * 4


def order_and_messages(group: dist.ProcessGroup) -> tuple[list[int], int, int]:
    """Rows as (expert, sending rank, token) in the order the experts see them; messages and row elements sent."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    generator = torch.Generator().manual_seed(rank)
    experts = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(5)])
    tokens = torch.arange(5)[:, None].float() + 100 * rank
    sizes: list[int] = []
    original = dist.all_to_all_single

    def counting(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(input.numel())
        return original(output, input, *args, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", counting):
        routing = route(experts, 4, group)
        rows = dispatch(tokens, routing)
    assert routing.offsets.tolist() == torch.tensor(routing.rows_per_expert).cumsum(0).tolist()
    start, keys = 0, []
    for expert, count in enumerate(routing.rows_per_expert):
        keys += [1000 * (rank * 4 // size + expert) + int(row) for row in rows[start : start + count, 0]]
        start += count
    return keys, len(sizes), sizes[-1]


def test_rows_arrive_by_expert_then_rank_then_token(pool: GlooPool) -> None:
    results = pool.run(order_and_messages, 2)
    everything = [key for keys, _, _ in results for key in keys]
    assert everything == sorted(everything)
    assert len(everything) == 2 * 5 * 2
    assert [(messages, elements) for _, messages, elements in results] == [(2, 10), (2, 10)]


def test_experts_without_rows_get_zero_gradients() -> None:
    rows, weight = torch.randn(3, 4, requires_grad=True), torch.randn(3, 5, 4, requires_grad=True)
    grouped_linear(rows, weight, [0, 3, 0]).sum().backward()
    assert weight.grad is not None
    assert not weight.grad[0].any() and weight.grad[1].any() and not weight.grad[2].any()
    weight.grad = None
    grouped_linear(rows[:0], weight, [0, 0, 0]).sum().backward()
    assert weight.grad is not None and not weight.grad.any()


ROWS = [[5, 11, 0, 16], [0, 0, 33, 0], [1, 2, 3, 4]]


@needs_cuda
@pytest.mark.parametrize("counts", ROWS)
def test_fused_grouped_product_equals_the_loop(counts: list[int]) -> None:
    check_fused_product(counts, "cuda")


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped product")
@pytest.mark.parametrize("counts", ROWS)
def test_calls_of_the_fused_product_are_right_on_the_cpu_too(counts: list[int]) -> None:
    with mock.patch.object(grouped_linear_module, "can_group", lambda *_: True):
        check_fused_product(counts, "cpu")


def check_fused_product(counts: list[int], device: str) -> None:
    torch.manual_seed(0)
    rows = torch.randn(sum(counts), 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 32, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    assert grouped_linear_module.can_group(rows, weight)
    out = grouped_linear(rows, weight, counts)
    grad_out = torch.randn_like(out)
    actual = (out, *torch.autograd.grad(out, (rows, weight), grad_out))
    parts = [part @ expert.t() for part, expert in zip(rows.double().split(counts), weight.double(), strict=True)]
    expected_out = torch.cat(parts)
    expected = (expected_out, *torch.autograd.grad(expected_out, (rows, weight), grad_out.double()))
    assert all(relative_error(a, e) <= 1e-2 for a, e in zip(actual, expected, strict=True))


def test_router_and_block_stay_those_of_transformers(pool: GlooPool) -> None:
    for names in pool.run(names_after_replacement, 2):
        assert names == ["MixtralSparseMoeBlock", "MixtralTopKRouter", "ExpertParallelExperts"]


def names_after_replacement(group: dist.ProcessGroup) -> list[str]:
    block = build_block("mixtral")
    before = set(dict(block.named_parameters()))
    replace_experts(block, group)
    assert set(dict(block.named_parameters())) == before
    assert isinstance(block.experts, ExpertParallelExperts)
    assert block.experts.gate_up_proj.shape == (EXPERTS // 2, 2 * INTERMEDIATE, HIDDEN)
    return [type(block).__name__, type(block.gate).__name__, type(block.experts).__name__]


def meta_shapes(group: dist.ProcessGroup) -> list[Any]:
    with torch.device("meta"):
        block = build_block("qwen3_moe")
    replace_experts(block, group)
    return [(weight.device.type, tuple(weight.shape)) for weight in block.experts.parameters()]


def test_experts_on_the_meta_device(pool: GlooPool) -> None:
    (shapes, _) = pool.run(meta_shapes, 2)
    assert shapes == [("meta", (4, 2 * INTERMEDIATE, HIDDEN)), ("meta", (4, HIDDEN, INTERMEDIATE))]


def shapes_under_fake_group(group: dist.ProcessGroup) -> list[Any]:
    """A block whose group only pretends to communicate, as when one rank of a plan is rehearsed."""
    block = build_block("qwen3_moe")
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    pairs = [dist.new_group(ranks, backend="fake") for ranks in ([0, 1], [2, 3])]
    replace_experts(block, pairs[dist.get_rank(group) // 2])
    tokens, grad_out = inputs(0, "spread")
    leaf = tokens.requires_grad_()
    out = block(leaf)
    out.backward(grad_out)
    assert leaf.grad is not None
    return [tuple(out.shape), tuple(leaf.grad.shape), tuple(block.experts.down_proj.grad.shape)]


def test_one_rank_rehearsed_alone(pool: GlooPool) -> None:
    for shapes in pool.run(shapes_under_fake_group, 4):
        assert shapes == [(BATCH, LENGTH, HIDDEN), (BATCH, LENGTH, HIDDEN), (EXPERTS // 2, HIDDEN, INTERMEDIATE)]


def test_wrong_sizes_are_refused_in_words() -> None:
    with pytest.raises(UserInputError, match="8 experts cannot be spread evenly over ep_size 3") as error:
        check_ep_size(8, 3)
    assert error.value.hint == "choose parallel.ep_size from 1, 2, 4, 8"


def refusal_without_experts(group: dist.ProcessGroup) -> str:
    with pytest.raises(UserInputError) as error:
        replace_experts(torch.nn.Linear(2, 2), group)
    return error.value.message


def test_a_model_without_experts_is_refused(pool: GlooPool) -> None:
    assert pool.run(refusal_without_experts, 1) == ["Linear has no mixture-of-experts block that hpjob knows"]
