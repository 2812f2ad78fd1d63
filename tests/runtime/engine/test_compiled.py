"""Compiled layers: everything is in whole graphs, one for all layers and microbatches, and gives the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from hpjob.runtime.engine import Engine
from hpjob.runtime.mesh import build_mesh
from hpjob.runtime.parity.case import Case, parse_case
from hpjob.runtime.parity.data import global_batch, rank_batch
from hpjob.runtime.rehearsal.fake_world import fake_world
from tests.support.alone import AloneEngine

# torch looks at gradients of what it traces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

SMALL = "num_hidden_layers=2 hidden_size=32 intermediate_size=48 vocab_size=96 seq_length=16 num_microbatches=2"
RING = "sp_size=2 sequence_parallelism_mode=ring_attn"
ALL_TO_ALL = "sp_size=2 sequence_parallelism_mode=all_to_all"
ZBV = "pp_size=2 pp_style=zbv num_model_chunks=2 num_hidden_layers=4"
MOE = "num_experts=4 num_experts_per_tok=2 moe_intermediate_size=16"


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs run as they were traced, without a compiler of kernels."""
    compile_function = torch.compile

    def traced(model: Any, *, options: object = None, **settings: Any) -> Any:
        return compile_function(model, backend="aot_eager", **settings)

    monkeypatch.setattr(torch, "compile", traced)
    torch._dynamo.reset()
    # Engines raise this limit of one function, so that there may be many in one process.
    with torch._dynamo.config.patch(recompile_limit=1):
        yield


def case_of(text: str, *, compiled: bool) -> Case:
    return parse_case(f"{SMALL} {text} enable_jit_fused={str(compiled).lower()}", world=None, steps=4)


def gradients_and_graphs(case: Case) -> tuple[dict[str, Tensor], list[float], list[int]]:
    """Gradients of a step; losses of step, evaluation, and both again; how many graphs there are after each."""
    counters.clear()
    losses, graphs = [], []
    with fake_world(0, case.world):
        torch.manual_seed(1)
        engine = AloneEngine(case.plan, case.recipe, build_mesh(case.plan, "cpu"), torch.device("cpu"))
        batch = rank_batch(global_batch(case.recipe, 1, case.documents), 0, case.plan.degrees.dp)
        for _ in range(2):
            losses.append(engine.accumulate_gradients(batch)[0].item())
            graphs.append(counters["stats"]["unique_graphs"])
            losses.append(engine.evaluate(batch)[0])
            graphs.append(counters["stats"]["unique_graphs"])
        gradients = {
            item.name: item.local_gradient.clone() for item in engine.parameters if item.local_gradient is not None
        }
    assert not counters["graph_break"]
    return gradients, losses, graphs


LAYER, NORM, ATTENTION, ROUTER, LOSS = 1, 1, 1, 1, 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{RING} recompute=selective documents=2", LAYER + NORM + LOSS),
        (f"{RING} sp_size=4 gpus_per_node=2 dp_size=2 zero_stage=3 recompute=full", LAYER + NORM + LOSS),
        (f"{ZBV} dp_size=2 zero_stage=1", LAYER + NORM + LOSS),
        # Embedded rows and received ones differ in the stride of their only sequence, so there are two graphs.
        (f"{ZBV} tp_size=2 sequence_parallelism_mode=split_gather", 2 * LAYER + NORM + LOSS),
        (f"{ALL_TO_ALL} recompute=full every_kth_layer=2", LAYER + NORM + LOSS),
        (f"{ALL_TO_ALL} recompute=selective documents=2", LAYER + NORM + LOSS),
        (f"{RING} model_type=mixtral {MOE}", NORM + ATTENTION + ROUTER + LOSS),
        (
            f"model_type=qwen3_moe {MOE} ep_size=2 dp_size=2 zero_stage=3 recompute=full",
            NORM + ATTENTION + ROUTER + LOSS,
        ),
    ],
)
def test_one_set_of_graphs_serves_all_layers_and_microbatches(text: str, expected: int) -> None:
    wanted, wanted_losses, none = gradients_and_graphs(case_of(text, compiled=False))
    assert none == [0] * 4
    found, losses, graphs = gradients_and_graphs(case_of(text, compiled=True))
    assert graphs == [expected, 2 * expected, 2 * expected, 2 * expected], "once to train, once to evaluate"
    assert losses == pytest.approx(wanted_losses, rel=1e-6)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_what_cannot_be_traced_stays_as_it_is() -> None:
    case = case_of("tp_size=2 sequence_parallelism_mode=ring", compiled=True)
    with fake_world(0, case.world):
        engine = Engine(case.plan, case.recipe, build_mesh(case.plan, "cpu"), torch.device("cpu"))
    modules = [module for stage in engine.stages for module in stage.modules()]
    assert not [module for module in modules if "forward" in vars(module)]
