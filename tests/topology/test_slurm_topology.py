"""What Slurm reports, as a topology; the client is a small executable that prints recorded text."""

import os
from pathlib import Path

import pytest

from hpjob.core.errors import EnvironmentProblemError, UserInputError
from hpjob.topology.model import Block
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


_BLOCKS = """\
BlockName=r1 BlockIndex=0 Nodes=a[01,06] BlockSize=2
BlockName=r2 BlockIndex=1 Nodes=a[02,07] BlockSize=2
BlockName=r3 BlockIndex=2 Nodes=a[03,04] BlockSize=2
BlockName=r4 BlockIndex=3 Nodes=a[05,08] BlockSize=2
AggregatedBlock=r[1-2] BlockIndex=4 Nodes=a[01-02,06-07] BlockSize=4
AggregatedBlock=r[3-4] BlockIndex=5 Nodes=a[03-05,08] BlockSize=4
"""


def test_blocks_and_aggregated_blocks_are_apart() -> None:
    fabric = parse_topology(_BLOCKS)
    assert fabric.switches == ()
    assert fabric.blocks[0] == Block(name="r1", nodes=("a01", "a06"))
    assert [(block.name, block.nodes) for block in fabric.aggregated_blocks] == [
        ("r[1-2]", ("a01", "a02", "a06", "a07")),
        ("r[3-4]", ("a03", "a04", "a05", "a08")),
    ]


def test_the_likely_nodes_lie_in_neighbouring_blocks(slurm: Path) -> None:
    """Whole blocks first, those of one larger block after each other."""
    (slurm / "topology.txt").write_text(_BLOCKS)
    (slurm / "sinfo.txt").write_text(
        "".join(f"a{i:02}|batch*|idle|96|1031000|gpu:h100:8\n" for i in (1, 2, 3, 5, 7, 8))
    )
    names = [node.name for node in cluster_topology(None, 6).nodes]
    # a06 and a04 are not in the partition: r2 and r4 are whole, and r1 and r3 hold a node each.
    assert names == ["a02", "a07", "a01", "a05", "a08", "a03"]
    assert cluster_topology(None, 3).aggregated_blocks is not None


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
