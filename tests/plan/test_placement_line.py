"""The line that each rank prints, and which device a planned GPU is for its process."""

import pytest

from hpjob.plan.model import Plan, RankPlace
from hpjob.plan.placement_line import device_index, placement_line
from hpjob.plan.planner import make_plan
from hpjob.recipe.load import load_recipe
from hpjob.topology.load import local_topology


def plan_on(gpus: list[int]) -> Plan:
    """A plan of two ranks on one node, on these GPUs."""
    changes = ["parallel.pp_size=1", "training.global_batch_size=8", "job.gpus_per_node=2"]
    plan = make_plan(load_recipe("tiny", changes), local_topology(1, 2))
    return plan.model_copy(
        update={"placement": tuple(RankPlace(rank=rank, node=0, gpu=gpu) for rank, gpu in enumerate(gpus))}
    )


def test_line_names_rank_node_gpu_and_coordinates() -> None:
    assert placement_line(plan_on([2, 0]), 1, "n3") == "rank 1 of 2 on n3 gpu 0: pp 0 dp 0 sp 0 tp 1"


@pytest.mark.parametrize(
    ("gpus", "visible", "count", "expected"),
    [
        ([2, 0], None, 4, [2, 0]),
        ([2, 0], "0,2", 2, [1, 0]),
        ([5, 6], "4,5,6,7", 4, [1, 2]),
        ([1, 0], "4,5", 2, [1, 0]),
        ([0, 1], "GPU-aa,GPU-bb", 2, [0, 1]),
        ([5, 6], None, 2, [None, None]),
    ],
)
def test_planned_gpu_among_the_visible_ones(
    gpus: list[int], visible: str | None, count: int, expected: list[int | None]
) -> None:
    assert [device_index(plan_on(gpus), rank, visible, count) for rank in (0, 1)] == expected
