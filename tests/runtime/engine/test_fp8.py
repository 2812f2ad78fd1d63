"""Products in 8 bits: the loss stays where it is in bf16, and only what is said runs in 8 bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torchao", reason="8-bit products need the [fp8] extra")

import torch

from hpjob.core.errors import EnvironmentProblemError
from hpjob.runtime.engine import Engine
from hpjob.runtime.mesh import build_mesh
from hpjob.runtime.parallel import fp8
from hpjob.runtime.parallel.linear import DeferringLinear
from hpjob.runtime.parity.case import Case, parse_case
from hpjob.runtime.parity.compare import Outcome
from hpjob.runtime.parity.data import global_batch, rank_batch
from hpjob.runtime.rehearsal.fake_world import fake_world
from hpjob.runtime.support import unsupported

STEPS = 40
SMALL = "num_hidden_layers=2 hidden_size=32 intermediate_size=64 vocab_size=96 num_attention_heads=2"
SMALL += " num_key_value_heads=1 seq_length=16 precision=bf16 num_microbatches=2"


def case(text: str = "") -> Case:
    return parse_case(f"{SMALL} {text}", world=None, steps=STEPS, model_type="llama")


def losses(case: Case, steps: int = STEPS) -> list[float]:
    """Train on four batches over and over, in one process."""
    with fake_world(0, 1):
        mesh = build_mesh(case.plan, "cpu")
        engine = Engine(case.plan, case.recipe, mesh, torch.device("cpu"))
        return [
            engine.train_step(rank_batch(global_batch(case.recipe, step % 4), 0, 1), step).loss
            for step in range(1, steps + 1)
        ]


def test_the_loss_stays_within_half_a_percent_of_bf16() -> None:
    half, eight = losses(case()), losses(case("use_fp8=true"))
    assert half[-1] < 0.97 * half[0]
    assert eight != half
    late = slice(-20, None)
    assert sum(eight[late]) == pytest.approx(sum(half[late]), rel=0.005)


def test_the_head_is_not_in_8_bits() -> None:
    with fake_world(0, 1):
        work = case("use_fp8=true")
        engine = Engine(work.plan, work.recipe, build_mesh(work.plan, "cpu"), torch.device("cpu"))
        (stage,) = engine.stages
        in_fp8 = {name for name, module in stage.named_modules() if isinstance(module, DeferringLinear) and module.fp8}
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert {name.rpartition(".")[2] for name in in_fp8} == set(names)
    assert len(in_fp8) == 2 * len(names)


def test_every_product_of_a_split_sequence_is_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[tuple[int, ...]] = []
    multiply = fp8.Fp8Product.__call__

    def counted(self: fp8.Fp8Product, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        products.append(tuple(weight.shape))
        return multiply(self, inputs, weight)

    monkeypatch.setattr(fp8.Fp8Product, "__call__", counted)
    split = "tp_size=2 enable_sequence_parallelism=true sequence_parallelism_mode=split_gather"
    with fake_world(0, 2):
        work = case(f"use_fp8=true {split} num_key_value_heads=2 num_microbatches=1")
        engine = Engine(work.plan, work.recipe, build_mesh(work.plan, "cpu"), torch.device("cpu"))
        engine.train_step(rank_batch(global_batch(work.recipe, 1), 0, 1), 1)
    assert len(products) == 2 * 7


@pytest.mark.distributed
def test_over_tensor_parallel_ranks_it_is_close_to_one_process(parity: Callable[..., Outcome]) -> None:
    outcome = parity(
        "tp_size=2 use_fp8=true intermediate_size=64 num_attention_heads=2 num_key_value_heads=2", precision="bf16"
    )
    assert outcome.loss_rel is not None and outcome.loss_rel < 0.01


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("precision=fp16", "not with the loss scale"),
        ("tp_size=2 enable_sequence_parallelism=true sequence_parallelism_mode=ring", "use split_gather"),
        ("pp_size=2 pp_style=zbv num_model_chunks=1", "use 1f1b or interleaved"),
        ("intermediate_size=72", "the MLP width of a tp rank is 72"),
        ("tp_size=2 num_attention_heads=2 num_key_value_heads=2 hidden_size=24", "the query heads of a tp rank is 12"),
    ],
)
def test_what_is_not_possible_is_said(text: str, words: str) -> None:
    work = case(f"use_fp8=true {text}")
    assert any(words in reason for reason in unsupported(work.plan, work.recipe))


def test_without_torchao_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblemError, match="torchao"):
        fp8.Fp8Product(torch.device("cpu"))
