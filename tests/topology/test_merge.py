"""Several sources of one machine: gaps filled, disagreements said."""

from __future__ import annotations

from hpjob.topology.merge import merge
from hpjob.topology.model import Gpu, Island, Nic, Node, Switch, Topology
from hpjob.topology.read.recognise import read_text
from tests.topology import fixtures


def one(source: str, **fields: object) -> Topology:
    return Topology(nodes=(Node.model_validate({"name": "n1", **fields}),), source=source)


def test_gaps_are_filled_and_sources_kept() -> None:
    matrix = read_text(fixtures.matrix(4, fixtures.all_linked(4, "NV12"))).topology
    cards = read_text("".join(f"GPU {k}: NVIDIA A100 (UUID: GPU-{k})\n" for k in range(4))).topology
    assert matrix is not None
    assert cards is not None
    found = merge([matrix, cards], node_name="host7")
    assert [node.name for node in found.nodes] == ["host7"]
    assert found.nodes[0].gpus[3].model == "NVIDIA A100"
    assert found.nodes[0].islands == (Island(kind="nvlink", gpus=(0, 1, 2, 3), all_to_all=True),)
    assert found.sources["nodes.host7.islands"] == "nvidia-smi topo -m"
    assert found.notes == ()


def test_disagreements_are_named() -> None:
    first = one("a", gpus=(Gpu(index=0, numa=0), Gpu(index=1)), islands=(Island(kind="nvlink", gpus=(0, 1)),), cpus=8)
    second = one("b", gpus=(Gpu(index=0, numa=1), Gpu(index=1), Gpu(index=2)), islands=(), cpus=4)
    notes = merge([first, second]).notes
    assert any("cpus is 8, but b says 4" in note for note in notes)
    assert any("2 GPUs, but b shows 3" in note for note in notes)
    assert any("numa is 0, but b says 1" in note for note in notes)
    assert any("islands" in note for note in notes)
    assert merge([first, first]).notes == ()


def test_a_rail_from_a_switch_port_replaces_a_guess() -> None:
    guess = one("a", nics=(Nic(name="mlx5_0", rail=0, rail_from="nearest NIC"),))
    wired = one("b", nics=(Nic(name="mlx5_0", rail=3, rail_from="switch port", leaf="leaf3"),))
    for order in ([guess, wired], [wired, guess]):
        found = merge(order)
        nic = (found.nodes[0].nics or ())[0]
        assert (nic.rail, nic.rail_from, nic.leaf) == (3, "switch port", "leaf3")
        assert found.notes == ()


def test_schedulers_and_fabrics_that_group_nodes_differently() -> None:
    nodes = tuple(Node(name=f"n{k}") for k in range(4))
    tree = Topology(
        nodes=nodes,
        source="slurm",
        switches=(Switch(name="a", level=0, nodes=("n0", "n1")), Switch(name="b", level=0, nodes=("n2",))),
    )
    fabric = Topology(
        nodes=nodes,
        source="ib",
        switches=(Switch(name="x", level=0, nodes=("n0", "n2")), Switch(name="y", level=0, nodes=("n1", "n3"))),
    )
    notes = merge([tree, fabric]).notes
    assert any("only one of slurm and ib knows n3" in note for note in notes)
    assert any("group n0, n1, n2 with different nodes" in note for note in notes)
