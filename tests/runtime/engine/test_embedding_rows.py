"""An embedding's gradient that is made once for several microbatches: exact, and the numbers of autograd's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpjob.runtime import embedding_rows
from hpjob.runtime.embedding_rows import add_rows
from hpjob.runtime.engine import Engine
from hpjob.runtime.mesh import build_mesh
from hpjob.runtime.model.stage import EMBEDDING
from hpjob.runtime.optimizer.master import MasterWeight
from hpjob.runtime.parallel.vocabulary import VocabularyParallelEmbedding
from hpjob.runtime.parity.case import parse_case
from hpjob.runtime.parity.data import global_batch, rank_batch
from hpjob.runtime.rehearsal.fake_world import fake_world
from tests.support.alone import AloneEngine

SMALL = "num_hidden_layers=1 hidden_size=32 intermediate_size=48 vocab_size=96 seq_length=16 num_attention_heads=4"
UNEVEN = "vocab_size=97 num_microbatches=5 tp_size=2"
"""49 rows for 80 tokens: a pass after four microbatches, and one at the end."""
ZBV = "pp_size=2 pp_style=zbv num_model_chunks=2 num_hidden_layers=4"


class Passes(TorchDispatchMode):
    """Counts how often the dense gradient of an embedding is made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        """Tokens of each."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.embedding_dense_backward.default:
            self.sizes.append(args[1].numel())
        return func(*args, **(kwargs or {}))


@contextmanager
def engine_of(text: str, steps: int = 1, frozen: str | None = None) -> Iterator[tuple[Engine, list[int]]]:
    """Rank 0 after the backward passes of some steps, and the tokens of each pass of the last one."""
    case = parse_case(f"num_microbatches=4 {SMALL} {text}", world=None, steps=steps)
    with fake_world(0, case.world):
        torch.manual_seed(1)
        engine = AloneEngine(case.plan, case.recipe, build_mesh(case.plan, "cpu"), torch.device("cpu"))
        for item in engine.parameters:
            item.parameter.requires_grad_(item.name != frozen)
        for step in range(1, steps + 1):
            with Passes() as passes:
                engine.accumulate_gradients(rank_batch(global_batch(case.recipe, step), 0, case.plan.degrees.dp))
                for item in engine.parameters:
                    _ = item.local_gradient
        yield engine, passes.sizes


def gradients(text: str, steps: int = 2) -> dict[str, Tensor]:
    with engine_of(text, steps) as (engine, _):
        return {p.name: p.local_gradient.float() for p in engine.parameters if p.local_gradient is not None}


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Call something while autograd makes the embedding's gradient of each microbatch."""

    def run(call: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(VocabularyParallelEmbedding, "sum_gradients", lambda *_: None)
            return call()

    return run


@pytest.mark.parametrize(
    "text",
    [
        "precision=fp32 dp_size=2 zero_stage=1 vocab_size=40 tie_word_embeddings=true",
        "precision=fp32 dp_size=2 zero_stage=0 model_type=gemma",
        f"precision=fp32 dp_size=2 zero_stage=1 {UNEVEN}",
        f"precision=fp32 dp_size=2 zero_stage=0 {UNEVEN} sequence_parallelism_mode=split_gather",
        f"precision=fp32 dp_size=2 zero_stage=1 {ZBV} tie_word_embeddings=true",
        # Autograd rounds the sum of each microbatch.
        "precision=bf16 tie_word_embeddings=true vocab_size=40",
        f"precision=bf16 {ZBV}",
        "precision=fp16 initial_scale=256 pp_size=2 num_hidden_layers=2",
    ],
)
def test_numbers_are_those_of_autograd(text: str, apart: Callable[..., Any]) -> None:
    found, expected = gradients(text), apart(lambda: gradients(text))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        if name == EMBEDDING and "fp32" not in text:
            assert distance(found[name], gradient) < 1e-2
        else:
            assert distance(found[name], gradient) < 1e-6, name


@pytest.mark.parametrize("text", ["dp_size=2 zero_stage=1 vocab_size=40", UNEVEN])
def test_rows_are_added_up_exactly(text: str, apart: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    expected: list[Tensor] = []
    hand = MasterWeight.add_rows

    def noted(self: MasterWeight, ids: Tensor, rows: Tensor, num_rows: int) -> None:
        zero = torch.zeros(num_rows, rows.shape[1], dtype=torch.float64)
        expected.append(zero.index_add_(0, ids, rows.double()))
        hand(self, ids, rows, num_rows)

    text = f"precision=bf16 {text}"
    monkeypatch.setattr(MasterWeight, "add_rows", noted)
    found = gradients(text, steps=1)[EMBEDDING]
    exact = torch.stack(expected).sum(0)[: len(found)]
    assert distance(found, exact) < 1e-6
    # Negative control: the sum of each microbatch in bf16 is not.
    assert distance(apart(lambda: gradients(text, steps=1))[EMBEDDING], exact) > 1e-4


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", [64]),
        ("tie_word_embeddings=true", [64]),
        ("dp_size=2 zero_stage=1", [64]),
        (ZBV, [64]),
        # As soon as there are as many as rows, and the rest at the end.
        ("vocab_size=40", [48, 16]),
        (UNEVEN, [64, 16]),
        ("num_microbatches=1", [16]),
        # Reduced after every microbatch.
        ("dp_size=2 zero_stage=2", [16] * 4),
        ("dp_size=2 zero_stage=3", [16] * 4),
    ],
)
def test_the_gradient_is_made_once_for_several_microbatches(text: str, tokens: list[int]) -> None:
    with engine_of(f"precision=bf16 {text}") as (_, found):
        assert found == tokens


def test_autograd_makes_one_of_each_microbatch(apart: Callable[..., Any]) -> None:
    def passes() -> list[int]:
        with engine_of("precision=bf16") as (_, found):
            return found

    assert apart(passes) == [16] * 4


@pytest.mark.parametrize("text", [UNEVEN, "tie_word_embeddings=true vocab_size=40"])
def test_two_runs_have_the_same_bits(text: str) -> None:
    first, second = (gradients(f"precision=bf16 {text}", steps=1) for _ in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_frozen_embedding_hands_on_nothing() -> None:
    with engine_of("precision=bf16", frozen=EMBEDDING) as (engine, passes):
        assert not passes
        reached = {item.name for item in engine.parameters if item.local_gradient is not None}
        assert reached == {item.name for item in engine.parameters} - {EMBEDDING}


def test_an_evaluation_leaves_no_rows() -> None:
    with engine_of("precision=bf16") as (engine, _):
        (item,) = (item for item in engine.parameters if item.name == EMBEDDING)
        assert item.local_gradient is not None
        before = item.local_gradient.clone()
        engine.evaluate(rank_batch(global_batch(engine._recipe, 2), 0, 1))
        assert torch.equal(item.local_gradient, before)


def test_lost_rows_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "precision=bf16 vocab_size=40"
    expected = gradients(text)[EMBEDDING]
    finish = MasterWeight.finish

    def forgetful(self: MasterWeight) -> None:
        if self.gradient is None:
            finish(self)

    monkeypatch.setattr(MasterWeight, "finish", forgetful)
    assert distance(gradients(text)[EMBEDDING], expected) > 0.1


@pytest.mark.parametrize("begun", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_home", [False, True])
def test_wide_weights_are_added_up_in_parts(
    begun: torch.dtype | None, has_home: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_rows, "_COLUMNS", 3)
    ids = [torch.randint(0, 5, (count,)) for count in (4, 9)]
    rows = [torch.randn(len(of), 8).bfloat16() for of in ids]
    total = None if begun is None else torch.randn(6, 8).to(begun)
    home = torch.full((6, 8), torch.nan) if has_home else None
    expected = torch.zeros(6, 8, dtype=torch.float64) if total is None else total.double()
    expected = expected.index_add(0, torch.cat(ids), torch.cat(rows).double())
    found = add_rows(total, ids, rows, 6, home)
    torch.testing.assert_close(found, expected.float())
    if home is not None and total is None:
        assert found is home
    if begun is torch.float32:
        assert found is total
