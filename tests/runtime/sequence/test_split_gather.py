"""Edges of a split sequence and the linears at them: parity, collectives and saved bytes counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hpjob.core.errors import UserInputError
from hpjob.runtime.sequence.compiled_gather import compiled_gather_linear
from hpjob.runtime.sequence.sequence_collectives import local_part
from hpjob.runtime.sequence.split_gather import (
    SequenceLinearSettings,
    gather_linear,
    gather_sequence,
    gather_sequence_replicated,
    linear_reduce_scatter,
    reduce_scatter_sequence,
    split_sequence,
)
from tests.runtime.gloo_pool import GlooPool
from tests.runtime.sequence.attention_reference import relative_error

BATCH, HIDDEN, INNER = 2, 12, 24
MODES = [False, True]


def whole_tensors(length: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """x, gate, up, down, gradient of the output of an MLP."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(BATCH, length, HIDDEN), (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER), (BATCH, length, HIDDEN)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def errors_of_mlp(
    group: dist.ProcessGroup, length: int, is_ring: bool, deferred: bool, dtype: torch.dtype = torch.float32
) -> list[float]:
    """Errors of output, input gradient, and the gradients of gate, up, down."""
    whole = whole_tensors(length, dtype)
    leaves = [tensor.double().requires_grad_() for tensor in whole[:4]]
    x, gate, up, down = leaves
    expected_out = ((x @ gate.t()).tanh() * (x @ up.t())) @ down.t()
    expected = [expected_out, *torch.autograd.grad(expected_out, leaves, whole[4].double())]

    later: list[Any] = []
    settings = SequenceLinearSettings(
        group=group,
        is_ring=is_ring,
        defer_weight_gradients=(lambda weights, compute: later.append((weights, compute))) if deferred else None,
    )
    shard = local_part(whole[0], group).requires_grad_()
    weights = [local_part(whole[1], group, 0), local_part(whole[2], group, 0), local_part(whole[3], group, 1)]
    gate, up, down = (weight.requires_grad_() for weight in weights)
    left, right = gather_linear(shard, (gate, up), settings)
    out = linear_reduce_scatter(left.tanh() * right, down, settings)
    out.backward(local_part(whole[4], group))
    for deferred_weights, compute in later:
        for weight, grad in zip(deferred_weights, compute(), strict=True):
            assert weight.grad is None
            weight.grad = grad
    assert len(later) == (2 if deferred else 0)
    actual = [out, shard.grad, gate.grad, up.grad, down.grad]
    parts = [
        *(local_part(e, group) for e in expected[:2]),
        *(local_part(e, group, 0) for e in expected[2:4]),
        local_part(expected[4], group, 1),
    ]
    assert all(a is not None and a.dtype == dtype for a in actual)
    return [relative_error(a, e) for a, e in zip(actual, parts, strict=True) if a is not None]


@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
@pytest.mark.parametrize("is_ring", MODES, ids=["split_gather", "ring"])
@pytest.mark.parametrize(("world", "length"), [(1, 5), (2, 10), (3, 9), (4, 12)])
def test_fp32_matches_one_process(pool: GlooPool, world: int, length: int, is_ring: bool, deferred: bool) -> None:
    for errors in pool.run(errors_of_mlp, world, length, is_ring, deferred):
        assert errors[0] <= 1e-6
        assert max(errors[1:]) <= 2e-6


@pytest.mark.parametrize("is_ring", MODES, ids=["split_gather", "ring"])
def test_bf16_stays_within_its_rounding(pool: GlooPool, is_ring: bool) -> None:
    for errors in pool.run(errors_of_mlp, 4, 12, is_ring, False, torch.bfloat16):
        assert max(errors) <= 2e-2


def errors_of_compiled_mlp(group: dist.ProcessGroup) -> list[float]:
    """The first two linears of an MLP, compiled, against the same not compiled: outputs and gradients."""
    whole = whole_tensors(4 * group.size())
    inputs = [local_part(whole[0], group), local_part(whole[1], group, 0), local_part(whole[2], group, 0)]

    def products(shard: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if torch.compiler.is_compiling():
            return compiled_gather_linear(shard, (gate, up), (None, None), group)
        return gather_linear(shard, (gate, up), SequenceLinearSettings(group=group))

    def results(function: Callable[..., tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        left, right = function(*leaves)
        out = left.tanh() * right
        return [left, right, *torch.autograd.grad(out.square().sum(), leaves)]

    compiled = torch.compile(products, fullgraph=True, backend="aot_eager")
    return [relative_error(a, e) for a, e in zip(results(compiled), results(products), strict=True)]


def test_compiled_linears_gather_to_the_same_numbers(pool: GlooPool) -> None:
    assert max(max(errors) for errors in pool.run(errors_of_compiled_mlp, 2)) <= 1e-6


@contextmanager
def counted_collectives() -> Iterator[dict[str, int]]:
    # Newer torch calls two of them otherwise.
    names = {
        "all_gather": "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor",
        "reduce_scatter": "reduce_scatter_single"
        if hasattr(dist, "reduce_scatter_single")
        else "reduce_scatter_tensor",
        "messages": "batch_isend_irecv",
    }
    counts = dict.fromkeys(names, 0)
    originals = {kind: getattr(dist, name) for kind, name in names.items()}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return originals[name](*args, **kwargs)

        return call

    with mock.patch.multiple(dist, **{name: counting(kind) for kind, name in names.items()}):
        yield counts


def counts_and_saved_bytes(group: dist.ProcessGroup, is_ring: bool) -> tuple[dict[str, int], dict[str, int], int]:
    """Collectives forward and backward of three column linears and a row linear, and bytes saved of the input."""
    settings = SequenceLinearSettings(group=group, is_ring=is_ring)
    shard = torch.randn(BATCH, 3, HIDDEN, requires_grad=True)
    weights = [torch.randn(6, HIDDEN, requires_grad=True) for _ in range(3)]
    row = torch.randn(HIDDEN, 6, requires_grad=True)
    saved: list[torch.Tensor] = []

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with counted_collectives() as counts:
        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            q, k, v = gather_linear(shard, weights, settings)
        out = linear_reduce_scatter(q + k + v, row, settings)
        forward = dict(counts)
        out.sum().backward()
    activations = sum(t.nbytes for t in saved if all(t is not weight for weight in weights))
    return forward, {name: counts[name] - forward[name] for name in counts}, activations


def test_collectives_of_split_gather_and_saved_bytes(pool: GlooPool) -> None:
    for forward, backward, saved in pool.run(counts_and_saved_bytes, 4, False):
        assert forward == {"all_gather": 1, "reduce_scatter": 1, "messages": 0}
        assert backward == {"all_gather": 2, "reduce_scatter": 1, "messages": 0}
        assert saved == BATCH * 3 * HIDDEN * 4


def test_messages_of_ring_and_saved_bytes(pool: GlooPool) -> None:
    for forward, backward, saved in pool.run(counts_and_saved_bytes, 4, True):
        assert forward == {"all_gather": 0, "reduce_scatter": 0, "messages": 6}
        assert backward == {"all_gather": 0, "reduce_scatter": 0, "messages": 9}
        assert saved == BATCH * 3 * HIDDEN * 4


def errors_of_edges(group: dist.ProcessGroup, dim: int) -> list[float]:
    """Each edge against its definition: out and gradient."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    shape = [3, 2, 4]
    shape[dim] = 2 * size
    generator = torch.Generator().manual_seed(5)
    everyone = [torch.randn(shape, generator=generator) for _ in range(size)]
    total = torch.stack(everyone).sum(0)
    mine, part = everyone[rank], local_part(everyone[0], group, dim)
    cases = [
        (gather_sequence, part, mine, everyone[0], local_part(total, group, dim)),
        (gather_sequence_replicated, part, mine, everyone[0], local_part(mine, group, dim)),
        (reduce_scatter_sequence, mine, part, local_part(total, group, dim), everyone[0]),
        (split_sequence, everyone[0], part, part, everyone[0]),
    ]
    errors = []
    for edge, tensor, grad_out, expected_out, expected_grad in cases:
        leaf = tensor.clone().requires_grad_()
        out = edge(leaf, group, dim=dim)
        (grad,) = torch.autograd.grad(out, leaf, grad_out)
        errors += [relative_error(out, expected_out), relative_error(grad, expected_grad)]
    return errors


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_edges(pool: GlooPool, world: int, dim: int) -> None:
    assert max(max(errors) for errors in pool.run(errors_of_edges, world, dim)) <= 1e-6


def refusal(group: dist.ProcessGroup) -> str:
    with pytest.raises(UserInputError) as error:
        linear_reduce_scatter(torch.zeros(1, 7, 4), torch.zeros(4, 4), SequenceLinearSettings(group=group))
    return f"{error.value.message}: {error.value.hint}"


def test_indivisible_sequence_is_refused(pool: GlooPool) -> None:
    (message, _) = pool.run(refusal, 2)
    assert message.startswith("a sequence of 7 tokens cannot be split over 2 ranks: pad to 8")
