"""Process groups of a mesh: each set of ranks once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hpjob.plan.model import Axis
from hpjob.runtime.engine import Engine
from hpjob.runtime.mesh import build_mesh
from hpjob.runtime.parity.case import Case, parse_case
from hpjob.runtime.process_groups import ProcessGroups
from hpjob.runtime.process_pool import ProcessPool

pytestmark = pytest.mark.distributed

SMALL = "num_hidden_layers=4 hidden_size=32 intermediate_size=48 vocab_size=96 seq_length=16 precision=fp32"


def groups_of(case: Case) -> tuple[int, list[list[int]], dict[str, list[int]]]:
    """How many groups this rank is in, their ranks, and the ranks along every axis."""
    mesh = build_mesh(case.plan, "cpu")
    engine = Engine(case.plan, case.recipe, mesh, torch.device("cpu"))
    made = [sorted(ranks) for ranks in dist.distributed_c10d._world.pg_group_ranks.values()]
    mine = [ranks for ranks in made if dist.get_rank() in ranks]
    axes = {axis.value: mesh.ranks(axis) for axis in Axis}
    axes |= {name: dist.get_process_group_ranks(mesh.parameter_mesh.get_group(name)) for name in ("replicate", "shard")}
    assert engine.stages
    return len(mine), mine, axes


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        ("dp_size=4 zero_stage=1", 2),
        # The world, tp, dp, pp, and this rank alone.
        ("tp_size=2 pp_size=2 dp_size=2 zero_stage=3", 5),
        ("pp_size=2 dp_size=2 pp_style=zbv num_model_chunks=2 tie_word_embeddings=true", 4),
        # dp·sp is a set of ranks of its own.
        ("tp_size=2 sp_size=2 dp_size=2 sequence_parallelism_mode=ring_attn", 6),
    ],
)
def test_a_rank_is_in_one_group_for_each_set_of_ranks(pool: ProcessPool, layout: str, count: int) -> None:
    case = parse_case(f"{SMALL} {layout}", world=None, steps=1)
    for rank, (found, mine, axes) in enumerate(pool.run(groups_of, case, world=case.world)):
        assert found == count
        assert len({tuple(ranks) for ranks in mine}) == count
        d = case.plan.degrees
        place = d.coordinates(rank)
        for axis in Axis:
            size = getattr(d, axis.value)
            expected = [r for r in range(d.world_size) if {**d.coordinates(r), axis: 0} == {**place, axis: 0}]
            assert (len(axes[axis.value]), axes[axis.value]) == (size, expected)
        assert len(axes["replicate"]) * len(axes["shard"]) == d.dp * d.sp


def test_a_mesh_has_falling_strides_whatever_its_ranks_were_cut_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 slices no other one, and a dim of size 1 may have any stride."""
    found: list[tuple[int, ...]] = []
    monkeypatch.setattr(ProcessGroups, "along", lambda *_: None)
    monkeypatch.setattr(DeviceMesh, "from_group", lambda _groups, _device, ranks, **_: found.append(ranks.stride()))
    ranks = torch.arange(2).view(1, 1, 2).transpose(1, 2)
    assert ranks.is_contiguous() and ranks.stride() != tuple(sorted(ranks.stride(), reverse=True))
    ProcessGroups("cpu").mesh(ranks, {"pp": "layers", "ep": "layers", "shard": "layers"})
    assert found == [tuple(sorted(found[0], reverse=True))]
