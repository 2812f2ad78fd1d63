"""A job over two leaf switches or blocks: the order of ranks fits them, and the ranks print just that order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpjob.core.run_dir import RunDir
from hpjob.plan.model import Axis
from hpjob.slurm.attempt_begin import read_plan
from hpjob.slurm.live import read_submissions
from hpjob.slurm.query import job_state
from hpjob.slurm.submit import submit
from hpjob.topology.load import load_topology
from hpjob.topology.slurm import cluster_topology
from tests.support.runs import make_run
from tests.support.slurm_sandbox import SlurmSandbox, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slurm_releases, pytest.mark.timeout(900)]
HALF = {"n1": 1, "n2": 1, "n3": 2, "n4": 2}
"""Leaf switch or block of each node."""
LINE = re.compile(r"^rank (\d+) of 16 on (\S+) gpu (\d+): pp (\d) dp (\d) sp 0 tp (\d)$", re.MULTILINE)


def finished_run(folder: Path, slurm: SlurmSandbox, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    slurm.use(monkeypatch)
    prepared = make_run(
        folder,
        topology=cluster_topology("batch", 4),
        executor="slurm",
        overrides=["parallel.pp_size=2", "parallel.tp_size=2", "training.global_batch_size=32"],
        spec_changes={"extra_options": ("--nodelist=n1,n3,n2,n4",), "segment": None},
        says_place=True,
    )
    submit(prepared.run, "slurm", prepared.spec, prepared.script)
    job_id = read_submissions(prepared.run)[-1].job_id
    wait_for(lambda: not job_state(job_id).is_live, "the job has ended", timeout=800)
    assert prepared.run.finished.exists(), prepared.run.slurm_log(job_id).read_text()
    return prepared.run


def test_pipeline_neighbours_share_a_leaf_or_block_and_ranks_print_their_places(
    new_sandbox: SlurmSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the names stage 0 would be one leaf and stage 1 the other: every message would cross."""
    is_block = bool(new_sandbox.release)  # topology/block came with newer releases than this machine's may be
    new_sandbox.start("--topology", "block" if is_block else "tree")
    # As long as a busy machine may take to start four interpreters.
    monkeypatch.setenv("HPJOB_DETECT_TIMEOUT_S", "300")
    run = finished_run(tmp_path / "run", new_sandbox, monkeypatch)
    (attempt,) = run.attempt_list()
    plan, topology = read_plan(attempt.plan), load_topology(str(attempt.topology))
    hosts = attempt.hosts.read_text().split()
    assert "nodes of the job" in topology.source
    assert [len(block.nodes) for block in topology.blocks or ()] == ([2, 2] if is_block else [])
    assert [len(block.nodes) for block in topology.aggregated_blocks or ()] == ([4] if is_block else [])
    for rank in range(8):
        assert plan.degrees.coordinates(rank)[Axis.PP] == 0
        assert HALF[hosts[rank]] == HALF[hosts[rank + 8]]
    printed = [LINE.search(attempt.rank_log(rank).read_text()) for rank in range(16)]
    for place, line in zip(plan.placement, printed, strict=True):
        assert line is not None
        at = plan.degrees.coordinates(place.rank)
        expected = (place.rank, hosts[place.rank], place.gpu, at[Axis.PP], at[Axis.DP], at[Axis.TP])
        assert line.groups() == tuple(str(value) for value in expected)
        assert topology.nodes[place.node].name == hosts[place.rank]
