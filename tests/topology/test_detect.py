"""Live detection without GPU, with fake sysfs, a fake driver library and fake tools."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpjob.core.errors import EnvironmentProblemError
from hpjob.topology.detect.cluster import detect_login, parse_reports
from hpjob.topology.detect.infiniband import infiniband_topology
from hpjob.topology.detect.node import detect_node
from hpjob.topology.detect.node_report import PREFIX, own_gpus, report
from hpjob.topology.detect.nvml import nvml_topology
from hpjob.topology.model import Gpu, Node, Topology
from tests.topology import fixtures


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty PATH folder for fake tools."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def put(folder: Path, name: str, text: str) -> None:
    """A tool that prints ``text`` whatever it is asked."""
    (folder / f"{name}.txt").write_text(text)
    script = folder / name
    script.write_text(f"#!/bin/sh\nexec /bin/cat '{folder / name}.txt'\n")
    script.chmod(0o755)


class FakeNvml(SimpleNamespace):
    """As much of the driver library as two linked GPUs need."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=141 * 2**30)

    def nvmlDeviceGetP2PStatus(self, first: int, second: int, index: int) -> int:
        return 0 if {first, second} == {0, 1} else 5

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if handle == 2:
            raise self.NVMLError("not supported")
        return 1


def test_driver_library_gives_links_and_absent_functions_stay_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    found = nvml_topology("n1")
    assert found is not None
    node = found.nodes[0]
    assert [(link.a, link.b, link.linked, link.count) for link in node.links or ()] == [
        (0, 1, True, 18),
        (0, 2, False, None),
        (1, 2, False, None),
    ]
    assert [island.gpus for island in node.islands or ()] == [(0, 1)]
    assert node.gpus[0].numa is None
    assert node.gpus[0].memory_gib == 141
    assert found.domains is None


def test_nothing_found_is_said(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = detect_node("bare")
    assert found.nodes[0].gpus == ()
    assert (found.nodes[0].cpus or 0) > 0
    assert any("no GPU found" in note for note in found.notes)
    with pytest.raises(EnvironmentProblemError, match="no Slurm here"):
        detect_login()


def test_text_is_the_fallback_and_guessed_rails_are_marked(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    put(tools, "nvidia-smi", fixtures.hgx())
    node = detect_node("n1").nodes[0]
    assert [island.gpus for island in node.islands or ()] == [tuple(range(8))]
    nics = {nic.name: nic for nic in node.nics or ()}
    assert (nics["mlx5_4"].rail, nics["mlx5_4"].rail_from) == (2, "nearest NIC")


def test_library_and_text_that_disagree_are_reported(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    put(tools, "nvidia-smi", fixtures.matrix(3, {(1, 2): "NV18"}))
    found = detect_node("n1")
    assert any("islands [[0, 1]], but nvidia-smi topo -m shows [[1, 2]]" in note for note in found.notes)


def test_infiniband_from_sysfs(tmp_path: Path) -> None:
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    for name, value in (("state", "4: ACTIVE"), ("rate", "400 Gb/sec (4X NDR)"), ("link_layer", "InfiniBand")):
        (port / name).write_text(value + "\n")
    (tmp_path / "class/infiniband/mlx5_1").mkdir()
    nics = infiniband_topology("n1", tmp_path).nodes[0].nics or ()
    assert (nics[0].active, nics[0].rate_gbit_s, nics[0].link_layer) == (True, 400, "InfiniBand")
    assert (nics[1].active, nics[1].rate_gbit_s) == (None, None)
    assert infiniband_topology("n1", tmp_path / "nowhere").nodes[0].nics is None


def test_a_node_report_survives_other_output(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "top.leaf2.n7")
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "switch.switch.node")
    line = report()
    reports, refused = parse_reports(f"motd\n0: {line}\n{PREFIX}{{broken\n")
    assert refused == 1
    assert [node.name for node in reports[0].nodes] == ["n7"]
    assert [(switch.name, switch.level) for switch in reports[0].switches or ()] == [("leaf2", 0), ("top", 1)]
    assert Topology.model_validate(json.loads(line.removeprefix(PREFIX))) == reports[0]


def test_login_joins_nodes_and_switches(tools: Path) -> None:
    put(tools, "scontrol", "NodeName=n1 Arch=x86 CPUTot=8 RealMemory=1024 Gres=gpu:h100:2 State=IDLE\n")
    assert os.environ["PATH"] == str(tools)
    found = detect_login()
    assert [len(node.gpus) for node in found.nodes] == [2]


def test_only_the_gpus_of_the_job_are_reported() -> None:
    node = Node(name="n", gpus=tuple(Gpu(index=index) for index in range(8)))
    found = own_gpus(Topology(nodes=(node,), source="NVML"), {"SLURM_JOB_GPUS": "4,6"})
    assert [gpu.index for gpu in found.nodes[0].gpus] == [4, 6]
    assert "2 of 8 GPUs belong to the job" in found.notes
    # Slurm hides the others from the driver: what is seen is the job's, under new numbers.
    hidden = Topology(nodes=(node.model_copy(update={"gpus": node.gpus[:2]}),), source="NVML")
    assert own_gpus(hidden, {"SLURM_JOB_GPUS": "4,6"}) == hidden
