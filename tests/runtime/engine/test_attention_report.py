"""The engine says which attention it runs."""

from __future__ import annotations

import pytest
import torch

from hpjob.runtime.engine import Engine
from hpjob.runtime.mesh import build_mesh
from hpjob.runtime.parity.case import Case, parse_case
from hpjob.runtime.process_pool import ProcessPool

pytestmark = pytest.mark.distributed


def attention_of(case: Case) -> str:
    return Engine(case.plan, case.recipe, build_mesh(case.plan, "cpu"), torch.device("cpu")).attention


@pytest.mark.parametrize(
    ("layout", "report"),
    [
        ("tp_size=2", "sdpa: cpu flash SDPA (tensors on the CPU)"),
        ("tp_size=1 recompute=selective", "sdpa: cpu flash SDPA (tensors on the CPU), recomputed"),
        ("sp_size=2 sequence_parallelism_mode=ring_attn", "ring_attn: zigzag ring over 2 ranks, cpu flash SDPA"),
        ("sp_size=2 sequence_parallelism_mode=all_to_all", "all_to_all: all-to-all over 2 ranks, cpu flash SDPA"),
    ],
)
def test_mode_kernel_and_reason_are_named(pool: ProcessPool, layout: str, report: str) -> None:
    case = parse_case(f"num_hidden_layers=1 precision=bf16 {layout}", world=None, steps=1)
    assert all(found.startswith(report) for found in pool.run(attention_of, case, world=case.world))
