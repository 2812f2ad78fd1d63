"""Packaged machines, topology files, and this host as virtual nodes."""

from pathlib import Path

import pytest

from hpjob.core.errors import UserInputError
from hpjob.topology.load import (
    dump_topology,
    load_machine,
    load_topology,
    local_topology,
    machine_names,
    machine_topology,
)

_NUMBERS = (
    "gpu_memory_gib",
    "peak_tflops_bf16",
    "memory_bandwidth_gb_s",
    "island_bandwidth_gb_s",
    "nic_bandwidth_gb_s",
)


@pytest.mark.parametrize("name", machine_names())
def test_every_machine_names_the_source_of_each_number(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    assert all(machine.sources.get(field) for field in _NUMBERS)


def test_unknown_machine_gets_the_nearest() -> None:
    with pytest.raises(UserInputError, match="unknown machine `dgx_h100`") as caught:
        load_machine("dgx_h100")
    assert "did you mean `hgx-h100`?" in caught.value.hint


def test_topology_file_round_trip(tmp_path: Path) -> None:
    topology = machine_topology(load_machine("gb200-nvl72"), 20)
    path = tmp_path / "topology.yaml"
    path.write_text(dump_topology(topology))
    assert load_topology(str(path)) == topology
    assert topology.blocks is not None
    assert [len(block.nodes) for block in topology.blocks] == [18, 2]


def test_islands_of_a_cube_mesh_are_its_quads() -> None:
    (node,) = machine_topology(load_machine("dgx-v100"), 1).nodes
    assert node.islands is not None
    assert [island.gpus for island in node.islands] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert machine_topology(load_machine("pcie-l40s"), 1).nodes[0].islands == ()


def test_local_nodes_share_the_hosts_memory() -> None:
    topology = local_topology(2, 4)
    assert [node.name for node in topology.nodes] == ["local-0", "local-1"]
    assert topology.machine is not None
    assert topology.machine.gpu_memory_gib * 8 == pytest.approx(topology.nodes[0].memory_gib, rel=0.01)
