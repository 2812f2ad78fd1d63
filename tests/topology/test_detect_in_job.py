"""Detection inside a job and from outside one, on a real Slurm."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hpjob.topology.model import Topology
from tests.support.slurm_sandbox import SlurmSandbox

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).resolve().parents[2]


def detected(text: str) -> Topology:
    return Topology.model_validate(json.loads(text))


def test_every_node_of_a_job_answers_and_leaves_are_known(slurm_sandbox: SlurmSandbox, tmp_path: Path) -> None:
    out = tmp_path / "topology.json"
    script = tmp_path / "job.sh"
    script.write_text(
        f"#!/bin/bash\nexport PYTHONPATH={ROOT}\n"
        f"{sys.executable} -m hpjob topology detect --json > {out}.part && mv {out}.part {out}\n"
    )
    job = slurm_sandbox.submit("--nodes=4", "--ntasks-per-node=1", f"--output={tmp_path}/log", script)
    slurm_sandbox.wait_for_job(job, "COMPLETED", "FAILED", "CANCELLED")
    assert out.is_file(), (tmp_path / "log").read_text()
    found = detected(out.read_text())
    assert len(found.nodes) == 4
    assert all(node.cpus for node in found.nodes)
    leaves = {switch.name: set(switch.nodes) for switch in found.switches or () if switch.level == 0}
    assert len(leaves) == 2
    assert set().union(*leaves.values()) >= {node.name for node in found.nodes}


def test_login_node_sees_gpus_and_leaves(slurm_sandbox: SlurmSandbox) -> None:
    done = slurm_sandbox.run(
        sys.executable, "-m", "hpjob", "topology", "detect", "--login", "--json", env={"PYTHONPATH": str(ROOT)}
    )
    found = detected(done.stdout)
    assert {len(node.gpus) for node in found.nodes} == {8}
    assert [switch.level for switch in found.switches or ()].count(0) == 2
