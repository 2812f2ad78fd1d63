"""Segments on block topology: ranks that talk much come into one block, and nothing is asked where it helps nobody."""

from __future__ import annotations

import pytest

from hpjob.plan.model import ParallelDegrees
from hpjob.plan.planner import make_plan
from hpjob.recipe.load import load_recipe
from hpjob.slurm.segment import segment_nodes, wanted_segment
from hpjob.topology.model import Block, Gpu, Node, Switch, Topology
from tests.support.fake_slurm import FakeSlurm


def blocks(*sizes: int, aggregated: tuple[int, ...] = (), switches: tuple[Switch, ...] | None = None) -> Topology:
    """Blocks of these sizes; each aggregated block holds the first so many nodes."""
    names = [f"n{index}" for index in range(sum(sizes))]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return Topology(
        nodes=tuple(Node(name=name, gpus=tuple(Gpu(index=i) for i in range(8)), cpus=64) for name in names),
        blocks=tuple(
            Block(name=f"b{start}", nodes=tuple(names[start : start + size]))
            for start, size in zip(starts, sizes, strict=True)
        ),
        aggregated_blocks=tuple(Block(name=f"a{size}", nodes=tuple(names[:size])) for size in aggregated) or None,
        switches=switches,
        source="slurm",
    )


@pytest.mark.parametrize(
    ("degrees", "topology", "segment"),
    [
        # Two stages of two nodes each: a pair of stages is two nodes.
        (ParallelDegrees(pp=2, dp=2, tp=8), blocks(2, 2), 2),
        # Stages are half a node: the whole pipeline is two nodes, each of four data-parallel copies too.
        (ParallelDegrees(pp=4, tp=4, dp=2), blocks(2, 2), 2),
        # A tensor group of two nodes, and two stages of it.
        (ParallelDegrees(pp=2, tp=16, dp=2), blocks(4, 4), 4),
        # Eight stages do not fit into a block of four nodes, four do.
        (ParallelDegrees(pp=8, tp=8), blocks(4, 4), 4),
        # Three of four stages would not divide the job.
        (ParallelDegrees(pp=4, tp=8, dp=2), blocks(3, 3, 3, 3), 2),
        # A job inside one block, no groups of several nodes, no blocks, a tree: nothing is asked.
        (ParallelDegrees(pp=2, tp=8), blocks(4, 4), None),
        (ParallelDegrees(dp=4, tp=8), blocks(2, 2), None),
        (ParallelDegrees(pp=4, tp=8), blocks(1, 1, 1, 1), None),
        (ParallelDegrees(pp=4, tp=8), blocks(2, 2, switches=(Switch(name="s", level=0),)), None),
        # No larger block holds the six nodes, and Slurm refuses them in one piece.
        (ParallelDegrees(dp=6, tp=8), blocks(2, 2, 2, aggregated=(4,)), 2),
        (ParallelDegrees(dp=6, tp=8), blocks(2, 2, 2, aggregated=(4, 6)), None),
        # A block with a node less holds one segment less.
        (ParallelDegrees(pp=2, dp=3, tp=8), blocks(2, 2, 1, 2), 2),
        (ParallelDegrees(pp=2, dp=3, tp=8), blocks(2, 2, 1, 1), None),
    ],
)
def test_nodes_that_have_to_share_a_block(degrees: ParallelDegrees, topology: Topology, segment: int | None) -> None:
    assert segment_nodes(degrees, 8, topology) == segment


def test_asked_only_where_sbatch_knows_it_and_nobody_said_otherwise(fake_slurm: FakeSlurm) -> None:
    overrides = ["parallel.pp_size=2", "parallel.tp_size=8", "training.global_batch_size=32"]
    topology = blocks(2, 2)
    plan = make_plan(load_recipe("llama3-8b", overrides), topology)
    assert plan.num_nodes == 4
    assert wanted_segment(plan, topology) is None
    # sbatch 24.11 takes it, though its help does not list it.
    fake_slurm.answer("sbatch --segment=2 --version", "slurm-wlm 24.11.5\n")
    assert wanted_segment(plan, topology) == 2
    assert wanted_segment(plan, topology, ["--constraint=x", "--segment=1"]) is None
    assert wanted_segment(plan, topology, ["--nodelist=n1,n3,n2,n4"]) is None  # Slurm refuses both together
