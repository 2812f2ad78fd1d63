"""What Slurm reports, as a topology; the client is a small executable that prints recorded text."""

import os
from pathlib import Path

import pytest

from hpjob.core.errors import EnvironmentProblemError, UserInputError
from hpjob.topology.slurm import cluster_topology, parse_sinfo, parse_topology

_SINFO = """\
a01|batch*|idle|96|1031000|gpu:a100_80g:8(S:0-1)
a02|batch*|drain|96|1031000|gpu:a100_80g:8(S:0-1)
a03|batch*|mix|96|1031000|gpu:a100_80g:8(S:0-1)
a04|batch*|idle*|96|1031000|gpu:a100_80g:8(S:0-1)
a05|batch*|idle|96|1031000|gpu:a100_80g:8(S:0-1)
c01|cpu|idle|64|256000|(null)
"""
_TREE = """\
SwitchName=spine Level=1 LinkSpeed=1 Nodes=a[01-05] Switches=leaf[1-2]
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=a[01-02,04] SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=a03,a05
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ``sinfo`` and ``scontrol`` that print files; sinfo keeps only the partition asked for."""
    (tmp_path / "sinfo.txt").write_text(_SINFO)
    (tmp_path / "topology.txt").write_text(_TREE)
    sinfo = f"""#!/bin/sh
for option; do case $option in
  --partition=*) grep "|${{option#*=}}[*]*|" {tmp_path}/sinfo.txt; exit 0;;
  --nodes=*) echo "${{option#*=}}" | tr , '\\n' | while read n; do grep "^$n|" {tmp_path}/sinfo.txt; done; exit 0;;
  --format=%R) printf 'batch\\ncpu\\n'; exit 0;;
esac; done
cat {tmp_path}/sinfo.txt
"""
    for name, text in (("sinfo", sinfo), ("scontrol", f"#!/bin/sh\ncat {tmp_path}/topology.txt\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return tmp_path


def test_usable_nodes_of_the_default_partition_under_the_fewest_leaves(slurm: Path) -> None:
    topology = cluster_topology(None, 2)
    assert [node.name for node in topology.nodes] == ["a03", "a05"]
    assert topology.machine is not None
    assert topology.machine.name == "dgx-a100-80g"
    assert len(topology.nodes[0].gpus) == 8
    assert topology.switches is not None
    assert [(s.name, s.nodes) for s in topology.switches if s.level == 0][1] == ("leaf2", ("a03", "a05"))


def test_nodes_given_to_a_job_keep_their_order(slurm: Path) -> None:
    assert [node.name for node in cluster_topology(None, 2, ["a05", "a01"]).nodes] == ["a05", "a01"]
    with pytest.raises(EnvironmentProblemError, match="does not know the nodes zz9"):
        cluster_topology(None, 1, ["zz9"])


def test_partition_without_gpus_runs_on_cpu_cores(slurm: Path) -> None:
    topology = cluster_topology("cpu", 1)
    assert topology.machine is not None
    assert topology.machine.name == "cpu"
    assert topology.nodes[0].cpus == 64


def test_more_nodes_than_the_partition_has(slurm: Path) -> None:
    with pytest.raises(UserInputError, match=r"4 nodes asked for, .* 3 usable nodes .*2 are down or drained") as caught:
        cluster_topology("batch", 4)
    assert "--nodes 3" in caught.value.hint


def test_unknown_partition_gets_the_nearest(slurm: Path) -> None:
    with pytest.raises(UserInputError, match="unknown partition `bach`") as caught:
        cluster_topology("bach", 1)
    assert "did you mean `batch`?" in caught.value.hint


def test_flat_network_is_said_not_guessed(slurm: Path) -> None:
    (slurm / "topology.txt").write_text("")
    topology = cluster_topology(None, 3)
    assert topology.switches is None
    assert any("no topology configured" in note for note in topology.notes)


def test_no_slurm_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentProblemError, match="no Slurm here") as caught:
        cluster_topology(None, 1)
    assert "--machine" in caught.value.hint


def test_blocks_are_read_and_aggregates_left_out() -> None:
    text = "BlockName=r1 BlockIndex=0 Nodes=b[01-04] BlockSize=4\n"
    text += "AggregatedBlock=r[1-2] BlockIndex=3 Nodes=b[01-08] BlockSize=8\n"
    switches, blocks = parse_topology(text)
    assert switches == ()
    assert [(block.name, block.nodes) for block in blocks] == [("r1", ("b01", "b02", "b03", "b04"))]


def test_broken_lines_are_left_out() -> None:
    assert parse_sinfo("garbage\n\na|b\n") == []
    (node,) = parse_sinfo("n1|p|idle|8+|1000+|gpu:2,gpu:v100:2(IDX:0-1)\n")
    assert (node.num_gpus, node.gpu_type, node.cpus, node.memory_gib) == (4, "v100", 0, 0.98)


def test_a_gres_of_slices_is_counted_and_marked(slurm: Path) -> None:
    assert [(node.gpu_type, node.num_gpus) for node in parse_sinfo("m1|p|idle|8|1024|gpu:1g.10gb:7(S:0)\n")] == [
        ("1g.10gb", 7)
    ]
    (slurm / "sinfo.txt").write_text("m1|mig*|idle|8|1024|gpu:a100_1g.10gb:7(S:0)\n")
    found = cluster_topology(None, 1)
    assert [gpu.mig for gpu in found.nodes[0].gpus] == [("a100_1g.10gb",)] * 7
    assert found.machine is None
    assert any("slice" in note for note in found.notes)
