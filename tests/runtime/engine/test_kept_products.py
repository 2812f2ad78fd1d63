"""zbv keeps tensors of a compiled backward pass until their weight gradients' turn; kernels must leave them alone."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from hpjob.runtime.mesh import build_mesh
from hpjob.runtime.parity.case import parse_case
from hpjob.runtime.parity.data import global_batch, rank_batch
from hpjob.runtime.rehearsal.fake_world import fake_world
from tests.support.alone import AloneEngine

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler of kernels for a CPU needs g++"),
    # torch's own, of its own modules.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning"),
]

ZBV = "pp_size=2 pp_style=zbv num_model_chunks=2 num_hidden_layers=4 num_microbatches=3 precision=fp32"
SMALL = "hidden_size=32 intermediate_size=48 vocab_size=96 seq_length=16"


def gradients(*, compiled: bool) -> dict[str, Tensor]:
    """Gradients of a step of rank 0."""
    text = f"{ZBV} {SMALL} enable_jit_fused={str(compiled).lower()}"
    case = parse_case(text, world=None, steps=1, model_type="llama")
    torch._dynamo.reset()
    torch.manual_seed(1)
    with fake_world(0, case.world):
        engine = AloneEngine(case.plan, case.recipe, build_mesh(case.plan, "cpu"), torch.device("cpu"))
        engine.accumulate_gradients(rank_batch(global_batch(case.recipe, 1), 0, 1))
        return {p.name: p.local_gradient for p in engine.parameters if p.local_gradient is not None}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest relative distance of a gradient."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - gradient).norm() / gradient.norm()) for name, gradient in expected.items())


def test_compiled_kernels_do_not_write_over_what_waits_for_its_weight_gradient() -> None:
    assert worst(gradients(compiled=True), gradients(compiled=False)) < 1e-5


def test_with_the_compiler_s_usual_settings_they_would(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with = torch.compile

    def careless(function: Any, **settings: Any) -> Any:
        return compile_with(function, **{**settings, "options": None})

    monkeypatch.setattr(torch, "compile", careless)
    assert worst(gradients(compiled=True), gradients(compiled=False)) > 0.1
