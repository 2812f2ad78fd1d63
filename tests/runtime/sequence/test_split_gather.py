"""Edges of a split sequence and the linears at them: parity, collectives and saved bytes counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hpjob.core.errors import UserInputError
from hpjob.runtime.sequence import overlapped_products as overlap
from hpjob.runtime.sequence.compiled_gather import compiled_gather_linear
from hpjob.runtime.sequence.compiled_scatter import compiled_linear_scatter
from hpjob.runtime.sequence.exchange import CollectiveExchange, PeerExchange, SequenceExchange
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
from tests.runtime.file_memory import FileMemory, HastyFileMemory
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


def exchange_between(group: dist.ProcessGroup, folder: str | None, meets: bool = True) -> SequenceExchange:
    if folder is None:
        return CollectiveExchange(group)
    memory = FileMemory if meets else HastyFileMemory
    return PeerExchange(group, partial(memory, group, folder), torch.device("cpu"))


def errors_of_compiled_mlp(group: dist.ProcessGroup, folder: str | None) -> list[float]:
    """An MLP on one row of tokens, compiled, against the same not compiled: output and gradients, three times."""
    whole = whole_tensors(4 * group.size())
    inputs = [
        local_part(whole[0][:1], group),
        local_part(whole[1], group, 0),
        local_part(whole[2], group, 0),
        local_part(whole[3], group, 1),
    ]
    exchange = exchange_between(group, folder)

    def mlp(shard: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            left, right = compiled_gather_linear(shard, (gate, up), (None, None), exchange)
            return compiled_linear_scatter(left.tanh() * right, down, None, exchange)
        settings = SequenceLinearSettings(group=group)
        left, right = gather_linear(shard, (gate, up), settings)
        return linear_reduce_scatter(left.tanh() * right, down, settings)

    def results(function: Callable[..., torch.Tensor], factor: float) -> list[torch.Tensor]:
        leaves = [(factor * tensor).requires_grad_() for tensor in inputs]
        out = function(*leaves)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    compiled = torch.compile(mlp, fullgraph=True, dynamic=False, backend="aot_eager")
    pairs = [(results(compiled, factor), results(mlp, factor)) for factor in (1.0, 0.5, 2.0)]
    return [relative_error(a, e) for actual, expected in pairs for a, e in zip(actual, expected, strict=True)]


@pytest.mark.parametrize("shares_memory", [False, True], ids=["collectives", "peer memory"])
@pytest.mark.parametrize("world", [2, 3])
def test_compiled_linears_come_to_the_same_numbers(
    pool: GlooPool, world: int, shares_memory: bool, tmp_path: Path
) -> None:
    folder = str(tmp_path) if shares_memory else None
    assert max(max(errors) for errors in pool.run(errors_of_compiled_mlp, world, folder)) <= 2e-6


def peer_products(group: dist.ProcessGroup, folder: str, meets: bool) -> list[float]:
    """Errors of gathers, products and sums through peer memory, with sizes that grow; one rank is late."""
    exchange = exchange_between(group, folder, meets)
    size, rank = group.size(), group.rank()
    errors = []
    for turn, length in enumerate((2, 2, 2, 4)):
        generator = torch.Generator().manual_seed(turn)
        everyone = [torch.randn(1, length * size, 5, generator=generator) for _ in range(size)]
        factors = [torch.randn(5, width, generator=generator) for width in (3, 3)]
        shard = local_part(everyone[0], group)
        if not meets:
            dist.barrier(group=group)
            time.sleep(0.2 * rank)
        pending = exchange.gather(shard)
        finish = exchange.multiply_while_scattering([everyone[rank], 2 * everyone[rank]], factors)
        whole, products = exchange.multiply_while_gathering(shard, factors)
        total = torch.stack(everyone).sum(0) @ (factors[0] + 2 * factors[1])
        pairs = [
            (pending.wait(), everyone[0]),
            (whole, everyone[0]),
            *((product, everyone[0] @ factor) for product, factor in zip(products, factors, strict=True)),
            (exchange.products(shard, factors[:1])[0], everyone[0] @ factors[0]),
            (finish().sum(0, keepdim=True), local_part(total, group)),
        ]
        errors += [relative_error(actual, expected) for actual, expected in pairs]
    return errors


@pytest.mark.parametrize("world", [2, 4])
def test_products_through_peer_memory(pool: GlooPool, world: int, tmp_path: Path) -> None:
    assert max(max(errors) for errors in pool.run(peer_products, world, str(tmp_path), True)) <= 2e-6


def test_ranks_that_do_not_meet_read_the_wrong_thing(pool: GlooPool, tmp_path: Path) -> None:
    assert max(max(errors) for errors in pool.run(peer_products, 2, str(tmp_path), False)) > 1e-2


def overlapped_products(group: dist.ProcessGroup, parts: int, lost: int) -> tuple[list[float], int]:
    """Errors of both kinds of products, in a given number of parts, and how many sums there were; ``lost`` rows of
    each rank are left out."""
    generator = torch.Generator().manual_seed(6)
    size, rows = group.size(), 6
    everyone = [torch.randn(1, rows * size, 5, generator=generator) for _ in range(size)]
    factors = [torch.randn(5, width, generator=generator) for width in (3, 4)]
    mine = everyone[group.rank()].clone()
    mine[:, :lost] = 0
    with mock.patch.object(overlap, "_LEAST_ROWS", rows // parts), counted_collectives() as counts:
        scattered = overlap.multiply_while_scattering([mine], factors[:1], group)()
    gathered, products = overlap.multiply_while_gathering(local_part(everyone[0], group), factors, group, width=None)
    (narrow,) = overlap.multiply_while_gathering(local_part(everyone[0], group), [factors[0][:2]], group, width=2)[1]
    total = torch.stack(everyone).sum(0) @ factors[0]
    pairs = [
        (scattered, local_part(total, group)),
        (gathered, everyone[0]),
        *((product, everyone[0] @ factor) for product, factor in zip(products, factors, strict=True)),
        (narrow, everyone[0][..., :2] @ factors[0][:2]),
    ]
    return [relative_error(actual, expected) for actual, expected in pairs], counts["reduce_scatter"]


@pytest.mark.parametrize(("world", "parts"), [(1, 2), (2, 1), (2, 2), (3, 3)])
def test_products_beside_communication(pool: GlooPool, world: int, parts: int) -> None:
    for errors, sums in pool.run(overlapped_products, world, parts, 0):
        assert max(errors) <= 1e-6
        assert sums == (1 if world == 1 else parts)


def test_a_part_that_is_not_summed_is_seen(pool: GlooPool) -> None:
    assert max(errors[0] for errors, _ in pool.run(overlapped_products, 2, 2, 1)) > 1e-2


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
