"""Weight gradients that the backward pass adds to their fp32 sums: the numbers of a pass of its own, in one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from hpjob.runtime.mesh import build_mesh
from hpjob.runtime.model.stage import EMBEDDING, DecoderStage
from hpjob.runtime.optimizer import master
from hpjob.runtime.optimizer.master import MasterWeight
from hpjob.runtime.parity.case import parse_case
from hpjob.runtime.parity.data import global_batch, rank_batch
from hpjob.runtime.rehearsal.fake_world import fake_world
from tests.support.alone import AloneEngine

pytestmark = [
    # torch looks at gradients of what it traces.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    # Nothing changes a stage's output in place.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]

LAYERS, LINEARS = 3, 7
SPLIT = "tp_size=2 sequence_parallelism_mode=split_gather"
SMALL = f"num_hidden_layers={LAYERS} hidden_size=32 intermediate_size=48 vocab_size=96 seq_length=16"
SMALL += " num_attention_heads=4 num_key_value_heads=2"


def gradients(text: str, steps: int = 2) -> dict[str, Tensor]:
    """Gradients of the last of some steps of rank 0, which the others' part is missing from."""
    case = parse_case(f"{SMALL} {text}", world=None, steps=steps, model_type="llama")
    with fake_world(0, case.world):
        torch.manual_seed(1)
        engine = AloneEngine(case.plan, case.recipe, build_mesh(case.plan, "cpu"), torch.device("cpu"))
        for step in range(1, steps + 1):
            engine.accumulate_gradients(rank_batch(global_batch(case.recipe, step), 0, case.plan.degrees.dp))
        return {p.name: p.local_gradient.float() for p in engine.parameters if p.local_gradient is not None}


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Tensor]]:
    """The same with gradients that autograd makes and a further pass adds up."""

    def run(text: str) -> dict[str, Tensor]:
        with monkeypatch.context() as patch:
            patch.setattr(DecoderStage, "sum_weight_gradients", lambda *_, **__: None)
            return gradients(text)

    return run


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of the gradients that went straight to their sum."""
    found: list[torch.Size] = []
    add_product = MasterWeight.add_product

    def counted(self: MasterWeight, gradient: Tensor, inputs: Tensor) -> None:
        found.append(self.value.shape)
        add_product(self, gradient, inputs)

    monkeypatch.setattr(MasterWeight, "add_product", counted)
    return found


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Graphs that are compiled, by a compiler that takes no time."""
    found: list[Any] = []
    compile_with = torch.compile

    def backend(graph: Any, inputs: Any) -> Any:
        found.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(
        torch, "compile", lambda function, *, options=None, **more: compile_with(function, backend=backend, **more)
    )
    torch._dynamo.reset()
    return found


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative distance of a gradient; what is missing counts as zero."""
    nothing = torch.zeros(())
    return max(float((found.get(n, nothing) - g).norm() / g.norm()) for n, g in expected.items() if g.norm())


@pytest.mark.parametrize(
    ("text", "straight"),
    [
        ("precision=bf16 recompute=full tie_word_embeddings=true", 3 * LAYERS * LINEARS),
        ("precision=bf16 recompute=selective model_type=qwen2", 3 * (LAYERS * LINEARS + 1)),
        # Weight gradients wait, two of the four layers and the head are this rank's.
        ("precision=bf16 pp_size=2 pp_style=zbv num_model_chunks=2 num_hidden_layers=4", 3 * (2 * LINEARS + 1)),
        # Each rank has a slice of whole key and value projections.
        ("precision=fp16 initial_scale=256 tp_size=4", 3 * (LAYERS * (LINEARS - 2) + 1)),
        ("precision=bf16 dp_size=2 zero_stage=1", 3 * (LAYERS * LINEARS + 1)),
        ("precision=fp32 dp_size=2 zero_stage=0", 3 * (LAYERS * LINEARS + 1)),
    ],
)
def test_sums_are_those_of_a_pass_of_its_own(
    text: str, straight: int, apart: Callable[..., dict[str, Tensor]], products: list[torch.Size]
) -> None:
    text = f"num_microbatches=3 {text}"
    found = gradients(text)
    assert len(products) == 2 * straight  # two steps
    expected = apart(text)
    assert found.keys() == expected.keys()
    # Autograd adds an embedding's rows up in the dtype of the computation: tests of rows have its exact sum.
    rows, rounded = found.pop(EMBEDDING, None), expected.pop(EMBEDDING, None)
    assert distance(found, expected) < 1e-6
    if rows is not None and rounded is not None:
        assert distance({EMBEDDING: rows}, {EMBEDDING: rounded}) < (1e-6 if "fp32" in text else 1e-2)


@pytest.mark.parametrize(
    "text",
    [
        "precision=bf16 num_microbatches=2 dp_size=2 zero_stage=1 cpu_offload=true",
        "precision=bf16 num_microbatches=1",
        "precision=fp32 num_microbatches=2",
    ],
)
def test_other_gradients_are_added_as_they_were(text: str, products: list[torch.Size]) -> None:
    assert len(gradients(text, steps=1)) > LAYERS * LINEARS / 2
    assert not products


@pytest.mark.parametrize(
    "more", ["recompute=full tie_word_embeddings=true", "recompute=selective", "dp_size=2 zero_stage=1 recompute=full"]
)
def test_one_graph_serves_all_compiled_layers(
    more: str, apart: Callable[..., dict[str, Tensor]], products: list[torch.Size], graphs: list[Any]
) -> None:
    text = f"precision=bf16 num_microbatches=3 {more}"
    found = gradients(f"{text} enable_jit_fused=true")
    assert len(graphs) == 3  # a layer, the last norm, the loss
    assert len(products) == 2 * 3 * (LAYERS * LINEARS + ("tie" not in more))
    expected = apart(text)
    del found[EMBEDDING], expected[EMBEDDING]
    assert distance(found, expected) < 1e-6


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of products that were added up in fp32, as a GPU does and a CPU cannot."""
    found: list[torch.Size] = []

    def add(total: Tensor | None, gradient: Tensor, inputs: Tensor, home: Tensor | None = None) -> Tensor:
        assert home is None, "only memory that ranks share is one"
        product = gradient.float().t() @ inputs.float()
        found.append(product.shape)
        return product if total is None else total.add_(product)

    monkeypatch.setattr(master, "multiplies_to_single", lambda *_: True)
    monkeypatch.setattr(master, "add_single_product", add)
    return found


@pytest.mark.parametrize(
    ("text", "straight"),
    [
        ("dp_size=2 zero_stage=1", 3 * (LAYERS * LINEARS + 1)),
        ("dp_size=2 zero_stage=1 num_microbatches=1", LAYERS * LINEARS + 1),
        ("dp_size=2 zero_stage=0 recompute=full", 3 * (LAYERS * LINEARS + 1)),
        ("tp_size=2 dp_size=2 zero_stage=1 enable_jit_fused=true", 3 * (LAYERS * LINEARS + 1)),
        ("pp_size=2 pp_style=zbv num_model_chunks=2 num_hidden_layers=4 dp_size=2", 3 * (2 * LINEARS + 1)),
        # The head is not compiled: its gather and product are one function with its gradient.
        (f"{SPLIT} enable_jit_fused=true", 3 * LAYERS * LINEARS),
        (f"{SPLIT} enable_jit_fused=true dp_size=2", 3 * LAYERS * LINEARS),
        # Reduced after every microbatch, each of which has a sum of its own.
        ("dp_size=2 zero_stage=2", 3 * (LAYERS * LINEARS + 1)),
        ("dp_size=2 zero_stage=3", 3 * (LAYERS * LINEARS + 1)),
    ],
)
def test_products_go_straight_to_the_sums_that_are_reduced(
    text: str, straight: int, graphs: list[Any], multiplied: list[torch.Size]
) -> None:
    count = "" if "num_microbatches" in text else "num_microbatches=3"
    assert gradients(f"precision=bf16 {count} {text}", steps=1)
    assert len(multiplied) == straight


@pytest.mark.parametrize("mode", ["", f"{SPLIT} enable_jit_fused=true"])
def test_a_frozen_weight_hands_on_nothing(mode: str, graphs: list[Any], products: list[torch.Size]) -> None:
    case = parse_case(f"{SMALL} precision=bf16 num_microbatches=3 {mode}", world=None, steps=1, model_type="llama")
    with fake_world(0, case.world):
        engine = AloneEngine(case.plan, case.recipe, build_mesh(case.plan, "cpu"), torch.device("cpu"))
        frozen = [p for p in engine.parameters if "mlp.up_proj" in p.name or "self_attn.o_proj" in p.name]
        for item in frozen:
            item.parameter.requires_grad_(False)
        engine.accumulate_gradients(rank_batch(global_batch(case.recipe, 1), 0, 1))
        assert products
        assert len(frozen) == 2 * LAYERS and all(item.local_gradient is None for item in frozen)


def test_a_lost_microbatch_would_be_noticed(
    apart: Callable[..., dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "precision=bf16 num_microbatches=3"

    def forgetful(self: MasterWeight, gradient: Tensor, inputs: Tensor) -> None:
        self.gradient = gradient.t() @ inputs

    monkeypatch.setattr(MasterWeight, "add_product", forgetful)
    assert distance(gradients(text), apart(text)) > 0.1
