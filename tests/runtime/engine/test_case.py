"""Reading parity cases."""

from __future__ import annotations

import pytest

from hpjob.core.errors import UserInputError
from hpjob.runtime.parity.case import parse_case


def test_data_parallelism_fills_the_world() -> None:
    case = parse_case("tp_size=2 pp_size=2 zero_stage=1 precision=fp32", world=8, steps=20)
    assert case.plan.degrees.model_dump() == {"pp": 2, "dp": 2, "sp": 1, "tp": 2, "ep": 1}
    assert (case.world, case.plan.zero_stage, case.plan.precision) == (8, 1, "fp32")


def test_degrees_may_need_fewer_processes() -> None:
    assert parse_case("tp_size=2 dp_size=1", world=8, steps=1).world == 2


def test_values_reach_model_pipeline_and_optimizer() -> None:
    case = parse_case(
        "pp_size=2 dp_size=1 num_hidden_layers=5 layers_per_stage=4,1 microbatch_size=3 lr=1e-2 vocab_size=77",
        world=2,
        steps=1,
    )
    assert case.plan.pipeline.layers_per_stage == (4, 1)
    assert case.recipe.training.global_batch_size == 12
    assert (case.recipe.optimizer.lr, case.recipe.model.vocab_size) == (1e-2, 77)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp_sise=2", "is no setting"),
        ("tp_size=3", "does not divide the world of 8"),
        ("tp_size=two", "tp"),
        ("zero_stage=4", "zero_stage"),
        ("pp_size=2 layers_per_stage=1,2", "does not split"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        parse_case(text, world=8, steps=1)
