"""Weights that all data-parallel ranks hold whole: the numbers of one rank, and nothing copied on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hpjob.runtime.engine import Engine
from hpjob.runtime.mesh import build_mesh
from hpjob.runtime.model.parameters import ShardedParameter
from hpjob.runtime.optimizer.master import MasterWeight
from hpjob.runtime.parallel import weight_unit
from hpjob.runtime.parallel.own_chunk import OwnChunk, SharingRanks
from hpjob.runtime.parallel.shared_weights import SharedWeights
from hpjob.runtime.parallel.weight_unit import Sharing
from hpjob.runtime.parity.case import Case, parse_case
from hpjob.runtime.parity.compare import Outcome, assemble, relative_difference
from hpjob.runtime.parity.data import global_batch, rank_batch
from hpjob.runtime.parity.worker import Part
from hpjob.runtime.process_pool import ProcessPool
from hpjob.runtime.rehearsal.fake_world import fake_world
from tests.support.alone import AloneEngine

pytestmark = [
    pytest.mark.distributed,
    # torch looks at gradients of what it traces.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

SMALL = "num_hidden_layers=2 hidden_size=32 intermediate_size=50 vocab_size=97 seq_length=16"
UNEVEN = "vocab_size=97 intermediate_size=50"
"""Of these and hidden 32, no size divides by 3, and the vocabulary by nothing."""


@pytest.mark.parametrize(
    "case",
    [
        f"dp_size=3 zero_stage=1 {UNEVEN} tie_word_embeddings=true",
        f"dp_size=3 zero_stage=0 {UNEVEN} num_microbatches=1 precision=bf16",
        f"dp_size=4 zero_stage=1 zero_shard_size=2 {UNEVEN} recompute=full precision=fp16",
        f"dp_size=3 zero_stage=2 {UNEVEN} num_microbatches=3",
        f"dp_size=3 zero_stage=3 {UNEVEN} num_microbatches=2 precision=bf16",
        f"dp_size=4 zero_stage=3 zero_shard_size=2 {UNEVEN} tie_word_embeddings=true num_microbatches=2 recompute=full",
    ],
)
def test_any_sizes_have_the_numbers_of_one_process(parity: Callable[..., Outcome], case: str) -> None:
    outcome = parity(case)
    assert outcome.ok, outcome


def trained(case: Case, frozen: tuple[str, ...], broken: str | None = None, compiled: bool = False) -> list[Part]:
    """Weights after two steps."""
    mesh = build_mesh(case.plan, "cpu")
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")), fault(broken):
        engine = Engine(case.plan, case.recipe, mesh, torch.device("cpu"))
        engine.optimizer._compiled = compiled
        for item in engine.parameters:
            item.parameter.requires_grad_(not any(name in item.name for name in frozen))
        for step in (1, 2):
            engine.train_step(rank_batch(global_batch(case.recipe, step), mesh.dp_rank, mesh.dp_size), step)
    return [(p.name, p.region, p.local.clone()) for p in engine.parameters]


@contextmanager
def fault(name: str | None) -> Iterator[None]:
    """Leave out one of the collectives of :mod:`weight_unit`."""
    if name is None:
        yield
        return
    with patch.object(weight_unit, name, lambda *_: SimpleNamespace(wait=lambda: None)):
        yield


def distance_from_one_rank(
    pool: ProcessPool, text: str, dp: int, frozen: tuple[str, ...] = (), **settings: Any
) -> float:
    one = parse_case(f"{SMALL} num_microbatches={dp} precision=fp32", world=None, steps=4)
    many = parse_case(f"{SMALL} num_microbatches=1 dp_size={dp} {text}", world=None, steps=4)
    expected, _ = assemble(part for parts in pool.run(trained, one, frozen, world=1) for part in parts)
    parts = pool.run(partial(trained, **settings), many, frozen, world=dp)
    found, differing = assemble(part for of_rank in parts for part in of_rank)
    assert not differing
    return relative_difference(found, expected)


# The very first layer then hands no gradient on, so that nothing says when the backward pass has left it.
FROZEN = ("embed_tokens", "layers.1.mlp", "layers.0.input_layernorm")


@pytest.mark.parametrize(
    "text",
    [
        "zero_stage=1 precision=fp32",
        "zero_stage=0 precision=fp32 recompute=full",
        "zero_stage=2 precision=fp32",
        "zero_stage=3 precision=fp32 recompute=full",
    ],
)
def test_frozen_weights_stay_and_hold_nobody_up(pool: ProcessPool, text: str) -> None:
    assert distance_from_one_rank(pool, text, 2, FROZEN) < 1e-6


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize("left_out", ["start_reduce_scatter", "start_all_gather", "start_all_reduce"])
def test_a_lost_exchange_would_be_noticed(pool: ProcessPool, left_out: str, zero_stage: int) -> None:
    distance = distance_from_one_rank(pool, f"zero_stage={zero_stage} precision=fp32", 2, broken=left_out)
    assert not distance <= 1e-4  # memory that was never written may be no number


@pytest.mark.parametrize("text", ["zero_stage=1 precision=fp32", "zero_stage=1 precision=bf16"])
def test_the_compiled_update_writes_chunks_where_they_lie(pool: ProcessPool, text: str) -> None:
    distance = distance_from_one_rank(pool, text, 3, compiled=True)
    assert distance < (1e-6 if "fp32" in text else 1e-2)


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_no_whole_gradient_is_copied_or_outlives_its_reduction(zero_stage: int, num_microbatches: int) -> None:
    text = f"vocab_size=96 dp_size=2 zero_stage={zero_stage} precision=bf16 num_microbatches={num_microbatches}"
    case = parse_case(f"{SMALL} {text}", world=None, steps=4)
    summed: list[int] = []
    sum_of = weight_unit._Member.total

    def noted(self: Any) -> Tensor:
        self.item.collect_gradient()
        self.master.finish()
        before, total = self.master.gradient.data_ptr(), sum_of(self)
        assert total.data_ptr() == before and total.dtype is torch.float32
        summed.append(before)
        return total

    with fake_world(0, case.world), patch.object(weight_unit._Member, "total", noted):
        engine = Engine(case.plan, case.recipe, build_mesh(case.plan, "cpu"), torch.device("cpu"))
        engine.train_step(rank_batch(global_batch(case.recipe, 1), 0, case.plan.degrees.dp), 1)
        assert len(summed) == len(engine.parameters) == 2 * 9 + 3
        for item in engine.parameters:
            gradient, weight = item.local_gradient, item.compute_weight
            assert gradient is not None
            # With ZeRO 0 what is reduced is the sum itself, else it is gone, and its memory may be used again.
            assert gradient.untyped_storage().nbytes() == 4 * item.local.numel()
            if num_microbatches > 1 or zero_stage == 0:
                assert (gradient.data_ptr() in summed) is (zero_stage == 0)
            assert weight is not None and weight.untyped_storage().data_ptr() == item.whole.data_ptr()


def has_gradient(item: ShardedParameter) -> bool:
    of_master = item.master is not None and (item.master.gradient is not None or item.master.reduced is not None)
    return item.parameter.grad is not None or of_master


def reduced_before_the_end(case: Case) -> list[tuple[int, int]]:
    """Of every reduction: weights that are in it, and gradients that exist when it begins."""
    found: list[tuple[int, int]] = []
    with fake_world(0, case.world):
        engine = Engine(case.plan, case.recipe, build_mesh(case.plan, "cpu"), torch.device("cpu"))

        def noted(_: Any, wholes: list[Tensor], __: Any) -> Any:
            held = [p for p in engine.parameters if has_gradient(p)]
            found.append((len(wholes), len(held)))
            return SimpleNamespace(wait=lambda: None)

        with patch.object(weight_unit, "start_reduce_scatter", noted):
            engine.accumulate_gradients(rank_batch(global_batch(case.recipe, 1), 0, case.plan.degrees.dp))
    return found


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_a_layer_is_reduced_before_the_backward_pass_comes_to_the_next(recompute: str) -> None:
    text = f"{SMALL} vocab_size=96 dp_size=2 zero_stage=1 num_microbatches=1 recompute={recompute}"
    # Norm and head; a layer; the layer before it; the embedding.
    assert reduced_before_the_end(parse_case(text, world=None, steps=4)) == [(2, 2), (9, 11), (9, 20), (1, 21)]


def test_deferred_gradients_of_a_layer_are_reduced_before_those_of_the_next_are_computed() -> None:
    text = f"{SMALL} num_hidden_layers=8 vocab_size=96 dp_size=2 zero_stage=1 pp_size=2 pp_style=zbv num_model_chunks=2"
    case = parse_case(f"{text} num_microbatches=2", world=None, steps=4)
    began: list[str] = []
    reduce, add_product = weight_unit.WeightUnit.reduce, MasterWeight.add_product

    def noted_reduction(self: Any, beside: Any, *, is_last: bool) -> None:
        began.extend([] if self.is_reduced else ["reduce"])
        reduce(self, beside, is_last=is_last)

    def noted_product(self: MasterWeight, *factors: Tensor) -> None:
        began.append("product")
        add_product(self, *factors)

    with (
        fake_world(0, case.world),
        patch.object(weight_unit.WeightUnit, "reduce", noted_reduction),
        patch.object(MasterWeight, "add_product", noted_product),
    ):
        engine = AloneEngine(case.plan, case.recipe, build_mesh(case.plan, "cpu"), torch.device("cpu"))
        engine.accumulate_gradients(rank_batch(global_batch(case.recipe, 1), 0, case.plan.degrees.dp))
    # The last stage: its head and two layers. The first one: two layers and the embedding.
    layer = ["product"] * 7 + ["reduce"]
    assert began[-17:] == [*layer, *layer, "reduce"]
    assert began.count("reduce") == 3 + 3


def most_whole(case: Case) -> tuple[int, int, int]:
    """Layers whose weights have memory at once within a step and an evaluation, at most; how many after them, and how
    many sets of whole gradients of a layer at once."""
    most, held = 0, 0
    with fake_world(0, case.world):
        engine = Engine(case.plan, case.recipe, build_mesh(case.plan, "cpu"), torch.device("cpu"))
        layers = engine.stages[0].decoder_layers

        def whole() -> int:
            return sum(any(p.untyped_storage().nbytes() for p in layer.parameters()) for layer in layers)

        def gradients() -> int:
            masters = {id(p.parameter): p.master for p in engine.parameters}
            of_layers = [[masters[id(p)] for p in layer.parameters()] for layer in layers]
            return sum(any(m is not None and m.gradient is not None for m in of_layer) for of_layer in of_layers)

        gather, reduce = weight_unit.WeightUnit.gather, weight_unit.WeightUnit.reduce

        def noted(self: Any) -> None:
            nonlocal most
            gather(self)
            most = max(most, whole())

        def noted_reduction(self: Any, beside: Any, *, is_last: bool) -> None:
            nonlocal held
            held = max(held, gradients())
            reduce(self, beside, is_last=is_last)

        with (
            patch.object(weight_unit.WeightUnit, "gather", noted),
            patch.object(weight_unit.WeightUnit, "reduce", noted_reduction),
        ):
            batch = rank_batch(global_batch(case.recipe, 1), 0, case.plan.degrees.dp)
            engine.train_step(batch, 1)
            engine.evaluate(batch)
    return most, whole(), held


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_layers_are_whole_only_while_they_are_used(recompute: str) -> None:
    text = f"{SMALL} vocab_size=96 num_hidden_layers=5 dp_size=2 zero_stage=3 num_microbatches=2 recompute={recompute}"
    # A layer, and the next one on its way.
    assert most_whole(parse_case(text, world=None, steps=4)) == (2, 0, 1)
    assert most_whole(parse_case(text.replace("stage=3", "stage=2"), world=None, steps=4)) == (5, 5, 1)


def losses_around_a_change(case: Case) -> tuple[float, float, float]:
    """Losses of an evaluation, of another after all weights were halved, and of a step after that."""
    mesh = build_mesh(case.plan, "cpu")
    engine = Engine(case.plan, case.recipe, mesh, torch.device("cpu"))
    batch = rank_batch(global_batch(case.recipe, 1), mesh.dp_rank, mesh.dp_size)
    before, _ = engine.evaluate(batch)
    with torch.no_grad():
        for item in engine.parameters:
            item.local.mul_(0.5)
            item.publish()
    after, _ = engine.evaluate(batch)
    return before, after, engine.train_step(batch, 1).loss


@pytest.mark.parametrize("more", ["", "tie_word_embeddings=true"])
def test_weights_that_were_whole_follow_a_change(pool: ProcessPool, more: str) -> None:
    text = f"{SMALL} vocab_size=96 dp_size=2 num_microbatches=2 precision=fp32 {more}"
    whole, freed = (
        pool.run(losses_around_a_change, parse_case(f"{text} zero_stage={stage}", world=None, steps=4), world=2)[0]
        for stage in (1, 3)
    )
    assert freed == pytest.approx(whole, rel=1e-6)
    assert abs(whole[0] - whole[1]) > 1e-4


class Weight:
    """A weight without an engine."""

    def __init__(self, shape: tuple[int, ...], ranks: SharingRanks) -> None:
        self.parameter = nn.Parameter(torch.zeros(shape))
        self.chunk = OwnChunk.of_shape(shape, 0, ranks)
        self.master = MasterWeight(torch.zeros(self.chunk.of(self.whole).shape), needs_single=True)

    @property
    def whole(self) -> Tensor:
        return self.parameter.detach()

    def collect_gradient(self) -> None:
        if self.parameter.grad is not None:
            self.master.add(self.parameter.grad)
            self.parameter.grad = None


def exchange(shard: int, zero_stage: int) -> tuple[list[list[float]], list[list[float]], int]:
    """Gradients and weights of two weights of which one has no gradient on rank 0, and the place in the shard group."""
    import torch.distributed as dist

    mesh = init_device_mesh("cpu", (dist.get_world_size() // shard, shard), mesh_dim_names=("replicate", "shard"))
    ranks = SharingRanks(mesh.get_group("shard"), mesh.get_group("replicate"))
    weights = [Weight((4, 1), ranks), Weight((3, 1), ranks)]
    layer = nn.Module()
    layer.even, layer.uneven = (weight.parameter for weight in weights)
    stage: Any = SimpleNamespace(part=SimpleNamespace(is_first=False, is_last=False), decoder_layers=[layer])
    shared = SharedWeights(stage, weights, Sharing(zero_stage=zero_stage, num_microbatches=2))
    rank = dist.get_rank()
    weights[0].parameter.grad = torch.arange(4.0).view(4, 1) + rank
    if rank:
        weights[1].parameter.grad = torch.full((3, 1), float(rank))
    shared.begin(reduces=True, is_last=True)
    shared.reduce()
    shared.finish_step()
    gradients = [weight.master.reduced.flatten().tolist() for weight in weights]  # type: ignore[union-attr]
    for weight in weights:
        weight.chunk.of(weight.whole).fill_(10.0 + mesh["shard"].get_local_rank())
        weight.chunk.is_news = True
    for hook in layer._forward_pre_hooks.values():
        hook(layer, (torch.zeros(1),))
    return gradients, [weight.whole.flatten().tolist() for weight in weights], mesh["shard"].get_local_rank()


@pytest.mark.parametrize(("world", "shard", "zero_stage"), [(2, 2, 1), (4, 2, 1), (4, 1, 0), (2, 2, 2), (4, 2, 2)])
def test_a_weight_without_a_gradient_on_one_rank_counts_as_zero_there(
    pool: ProcessPool, world: int, shard: int, zero_stage: int
) -> None:
    ranks = sum(range(world))
    for gradients, weights, place in pool.run(exchange, shard, zero_stage, world=world):
        size = 4 // shard
        assert gradients[0] == [world * row + ranks for row in range(place * size, (place + 1) * size)]
        mine = range(3)[place * 2 : place * 2 + 2] if shard == 2 else range(3)
        assert gradients[1] == [float(ranks)] * len(mine)
        assert weights[0] == [10.0 + row // size for row in range(4)]
        assert weights[1] == ([10.0, 10.0, 11.0] if shard == 2 else [10.0] * 3)
