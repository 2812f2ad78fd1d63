"""Groups that the prices assume are the groups that the runtime builds."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hpjob.plan import mesh_order
from hpjob.plan.fixed import fixed_pipeline, fixed_plan
from hpjob.plan.hardware import THROUGH_HOST, hardware_of
from hpjob.plan.layout import Layout
from hpjob.plan.legality import layout_of
from hpjob.plan.model import ParallelDegrees
from hpjob.plan.own_runtime import OwnRuntime
from hpjob.plan.shape import Shape
from hpjob.recipe.load import load_recipe
from hpjob.runtime import mesh as runtime_mesh
from hpjob.topology.load import load_machine


class _Seen:
    """Stands in for process groups and keeps the ranks of every mesh."""

    meshes: dict[tuple[str, ...], torch.Tensor]

    def __init__(self, device_type: str) -> None:
        self.meshes = {}

    def mesh(self, ranks: torch.Tensor, axes: dict[str, Any]) -> None:
        self.meshes[tuple(axes)] = ranks

    def groups(self, axis: str, *, of: str) -> list[list[int]]:
        axes, ranks = next((axes, ranks) for axes, ranks in self.meshes.items() if of in axes)
        return ranks.movedim(axes.index(axis), -1).flatten(0, -2).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("degrees", "shard"),
    [
        (ParallelDegrees(pp=2, dp=4, sp=2, tp=2, ep=4), None),
        (ParallelDegrees(pp=2, dp=4, sp=1, tp=4, ep=2), 2),
        (ParallelDegrees(pp=1, dp=8, sp=2, tp=2, ep=2), 4),
    ],
)
def test_groups_are_those_of_the_runtime(
    monkeypatch: pytest.MonkeyPatch, degrees: ParallelDegrees, shard: int | None
) -> None:
    recipe = load_recipe("qwen3-30b-a3b", ["parallel.zero_stage=1"])
    pipeline = fixed_pipeline(recipe, degrees, num_microbatches=2, microbatch_size=1)
    plan = fixed_plan(recipe, degrees, pipeline).model_copy(update={"zero_shard_size": shard})
    monkeypatch.setattr(runtime_mesh, "ProcessGroups", _Seen)
    monkeypatch.setattr(runtime_mesh.dist, "get_world_size", lambda: degrees.world_size)
    mesh = runtime_mesh.build_mesh(plan, "cpu")
    runtime_mesh.add_expert_mesh(mesh, plan)
    seen, layout = mesh.groups, layout_of(plan)
    assert isinstance(seen, _Seen)
    for group, axis, of in (
        (mesh_order.tp_group(layout), "tp", "dp"),
        (mesh_order.sp_group(layout), "sp", "dp"),
        (mesh_order.shard_group(layout), "shard", "shard"),
        (mesh_order.copy_group(layout), "replicate", "replicate"),
        (mesh_order.ep_group(layout), "ep", "ep"),
    ):
        for ranks in seen.groups(axis, of=of):
            assert ranks == [ranks[0] + index * group.stride for index in range(group.size)], axis


def _layout(**sizes: int) -> Layout:
    return Layout(**({"tp": 1, "pp": 1, "dp": 1, "num_microbatches": 8, "microbatch": 1, "seq": 4096} | sizes))


def test_groups_that_do_not_tile_a_node_leave_it_somewhere() -> None:
    hardware = hardware_of(load_machine("hgx-h100"))
    whole, uneven = _layout(tp=4, dp=6), _layout(tp=6, dp=4)
    assert not mesh_order.link_of(hardware, whole, mesh_order.tp_group(whole)).crosses_nodes
    assert mesh_order.link_of(hardware, uneven, mesh_order.tp_group(uneven)).crosses_nodes


def test_experts_are_exchanged_between_neighbours_whatever_sp_is() -> None:
    shape = Shape(8, 2048, 768, 16, 4, 128, 32000, num_experts=16, experts_per_token=4)
    runtime = OwnRuntime(shape, hardware_of(load_machine("hgx-h100")))
    layer = runtime.time_model(_layout()).layers
    spread = _layout(dp=8, sp=2, ep=8)._replace(sequence_mode="all_to_all")
    alone = spread._replace(ep=1)
    exchange = layer.layer(spread, experts=True).comm_forward - layer.layer(alone, experts=True).comm_forward
    plain = _layout(dp=16, ep=8)._replace(microbatch=1, seq=2048)
    alike = layer.layer(plain, experts=True).comm_forward
    assert exchange == pytest.approx(alike, rel=1e-6), "eight neighbours are one node with sp and without"


def test_every_hop_of_a_pipeline_has_the_link_of_its_own_place() -> None:
    """Two stages of four GPUs share a node, so every second hop leaves it; so does the way back to the first."""
    hardware = hardware_of(load_machine("hgx-h100"))
    links = mesh_order.stage_links(hardware, _layout(tp=4, pp=6))
    assert [link.crosses_nodes for link in links] == [False, True, False, True, False, True]
    assert links[0].bandwidth > 5 * links[1].bandwidth
    # A whole node a stage: all leave it; one node altogether: none does, there and back.
    assert all(link.crosses_nodes for link in mesh_order.stage_links(hardware, _layout(tp=8, pp=3)))
    assert not any(link.crosses_nodes for link in mesh_order.stage_links(hardware, _layout(tp=2, pp=4)))


def test_a_rack_is_one_island_for_pipelines_too() -> None:
    hardware = hardware_of(load_machine("gb200-nvl72"))
    assert not any(link.crosses_nodes for link in mesh_order.stage_links(hardware, _layout(tp=4, pp=18)))
    links = mesh_order.stage_links(hardware, _layout(tp=4, pp=36))
    assert [index for index, link in enumerate(links) if link.crosses_nodes] == [17, 35]


def test_a_pair_without_a_link_holds_up_exchanges_and_not_rings() -> None:
    whole = hardware_of(load_machine("hgx-h100"))
    lacking = replace(whole, island_size=4, linked_size=8, lines_up=True)
    for size, stride in ((4, 1), (8, 1), (2, 4)):
        assert lacking.link(size, stride) == whole.link(size, stride)
    assert lacking.link(8, 1, all_pairs=True).bandwidth == pytest.approx(7 * THROUGH_HOST)
    assert lacking.link(4, 1, all_pairs=True) == whole.link(4, 1, all_pairs=True)
    assert mesh_order.stage_links(lacking, _layout(tp=4, pp=4)) == mesh_order.stage_links(whole, _layout(tp=4, pp=4))
    # Where no order of the GPUs keeps the pair apart, stages may be the pair.
    stuck = replace(lacking, lines_up=False)
    assert [link.bandwidth for link in mesh_order.stage_links(stuck, _layout(tp=4, pp=2))] == [THROUGH_HOST] * 2
