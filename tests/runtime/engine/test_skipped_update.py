"""An update that is refused changes no bit of the state, on any rank, in any precision."""

from __future__ import annotations

import pytest
import torch

from hpjob.runtime.engine import Engine
from hpjob.runtime.mesh import build_mesh
from hpjob.runtime.parity.case import Case, parse_case
from hpjob.runtime.parity.data import global_batch, rank_batch
from hpjob.runtime.process_pool import ProcessPool

pytestmark = pytest.mark.distributed
SMALL = "num_hidden_layers=2 hidden_size=32 intermediate_size=48 vocab_size=97 seq_length=16 num_microbatches=2"


def refuse_second(case: Case) -> list[object]:
    """Train a step, have the next refused, train a third; return what changed when."""
    mesh = build_mesh(case.plan, "cpu")
    engine = Engine(case.plan, case.recipe, mesh, torch.device("cpu"))

    def step(number: int) -> bool:
        batch = rank_batch(global_batch(case.recipe, number), mesh.dp_rank, mesh.dp_size)
        return engine.train_step(batch, number).updated

    def state() -> list[torch.Tensor]:
        parts = [getattr(value, "to_local", lambda value=value: value)() for value in engine.state_dict().values()]
        return [part.clone() for part in parts]

    asked: list[tuple[float, float]] = []
    step(1)
    before = state()
    engine.accepts_update = lambda loss, norm: asked.append((loss, norm)) or False  # type: ignore[func-returns-value]
    updated = step(2)
    unchanged = all(map(torch.equal, before, state()))
    engine.accepts_update = None
    step(3)
    return [updated, unchanged, all(map(torch.equal, before, state())), asked]


@pytest.mark.parametrize("layout", ["tp_size=2 dp_size=2 zero_stage=1 precision=bf16", "pp_size=2 precision=fp16"])
def test_a_refused_update_changes_nothing(pool: ProcessPool, layout: str) -> None:
    case = parse_case(f"{SMALL} {layout}", world=None, steps=6, model_type="llama")
    results = pool.run(refuse_second, case, world=case.plan.degrees.world_size)
    for updated, unchanged, still_unchanged, asked in results:
        assert (updated, unchanged, still_unchanged) == (False, True, False)
        assert asked == results[0][3] and len(asked) == 1  # all ranks judge the same figures
