"""Slurm's topology and node records in every form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpjob.core import hostlist
from hpjob.topology.read.recognise import read_text
from hpjob.topology.read.slurm_hostlist import expand_hosts
from tests.topology import fixtures


def test_tree() -> None:
    reading = read_text(fixtures.slurm_tree())
    assert reading.kind == "slurm"
    assert reading.facts["switches_by_level"] == {"0": 2, "1": 1}
    assert reading.facts["roots"] == ["top"]
    assert reading.facts["nodes_per_leaf"] == {"leaf0": 4, "leaf1": 4}
    assert reading.topology is not None
    assert [switch.nodes for switch in reading.topology.switches or ()] == [
        ("n001", "n002", "n003", "n004"),
        ("n005", "n006", "n007", "n008"),
        (),
    ]


def test_configuration_heights_comments_and_dangling_child() -> None:
    text = (
        "# s0=rack A\nSwitchName=s0 Nodes=a[1-2]  # first\nswitchname=s1 nodes=a[3,5]\nSwitchName=up Switches=s[0-2]\n"
    )
    found = read_text(text).facts
    assert found["switches_by_level"] == {"0": 2, "1": 1}
    assert found["original_names"] == {"s0": "rack A"}
    assert found["undefined_children"] == ["s2"]
    assert found["valid"] is False


def test_blocks_snapshots_and_a_cut_record() -> None:
    line = "BlockName=b{} BlockIndex={} Nodes=n[{}] BlockSize=2\n"
    first = (
        line.format(1, 0, "1-2")
        + line.format(2, 1, "3-4")
        + "AggregatedBlock=b[1-2] BlockIndex=2 Nodes=n[1-4] BlockSize=4\n"
    )
    found = read_text(first).facts
    assert (found["blocks"], found["block_size"], found["aggregated"]) == ({"b1": 2, "b2": 2}, 2, {"b[1-2]": 4})
    topology = read_text(first).topology
    assert topology is not None
    assert [block.name for block in topology.blocks or ()] == ["b1", "b2"]
    assert [(block.name, len(block.nodes)) for block in topology.aggregated_blocks or ()] == [("b[1-2]", 4)]
    later = read_text(first + line.format(1, 0, "1") + "BlockName=b2 BlockIn").facts
    assert later["snapshots"] == 2
    assert later["blocks"] == {"b1": 1, "b2": None}


@pytest.mark.parametrize(("sizes", "valid"), [("4,8,16", True), ("4,12", False), ("3,6", True)])
def test_block_sizes(sizes: str, valid: bool) -> None:
    assert read_text(f"BlockName=b1 Nodes=n[1-4]\nBlockSizes={sizes}\n").facts["valid"] is valid


def test_yaml_of_several_plugins() -> None:
    text = """---
- topology: rings
  ring:
    rings:
      - ring: r1
        nodes: n[1-20]
- topology: tree
  cluster_default: true
  tree:
    switches:
      - switch: top
        children: s[1-2]
      - {switch: s1, nodes: "n[1-2]"}
      - {switch: s2, nodes: "n[3-4]"}
- topology: plain
  flat: true
"""
    found = read_text(text).facts
    assert found["plugin"] == "tree"
    assert found["rings"] == {"r1": 20}
    assert found["topologies"]["plain"] == {"plugin": "flat", "default": False, "nodes": None}
    assert found["valid"] is False
    assert found["children_of_switch"] == {"top": 2}


def test_yaml_anchors_are_refused() -> None:
    bomb = "- topology: t\n  tree:\n    a: &a [x, x]\n    b: &b [*a, *a]\n    switches: *b\n"
    assert read_text(bomb).facts["switches"] is None


def test_address_with_dotted_node_and_missing_level() -> None:
    text = (
        "SLURM_TOPOLOGY_ADDR=core[1-2]..leaf3.n1.example.org\nSLURM_TOPOLOGY_ADDR_PATTERN=switch.switch.switch.node\n"
    )
    found = read_text(text).facts
    assert found["addr"] == ["core[1-2]", "", "leaf3", "n1.example.org"]
    assert (found["top_switches"], found["leaf"], found["node"]) == (["core1", "core2"], "leaf3", "n1.example.org")


def test_node_records_name_what_cannot_be_used() -> None:
    text = (
        "NodeName=n1 Arch=x86_64 CoresPerSocket=8\n   CPUTot=64 RealMemory=1024 Gres=gpu:h100:8(S:0-1)\n"
        "   State=IDLE+DRAIN\n\n"
        "NodeName=n2 Arch=x86_64 CoresPerSocket=8\n   CPUTot=64 RealMemory=1024 Gres=gpu:h100:8\n   State=MIXED\n"
    )
    reading = read_text(text)
    assert reading.kind == "slurm_nodes"
    assert reading.facts["unusable"] == ["n1"]
    assert reading.facts["gpus_of_node"] == {"n1": 8, "n2": 8}


names = st.lists(st.from_regex(r"[a-z]{1,3}-?[0-9]{1,3}", fullmatch=True), min_size=1, max_size=30, unique=True)


@given(names)
def test_expanding_a_folded_list_gives_the_same_hosts(hosts: list[str]) -> None:
    folded = hostlist.fold(hosts)
    assert sorted(expand_hosts(folded) or []) == sorted(set(hosts))
    assert sorted(hostlist.expand(folded)) == sorted(set(hosts))


@given(names)
def test_order_written_is_kept(hosts: list[str]) -> None:
    assert expand_hosts(",".join(hosts)) == hosts


def test_absurd_and_cut_lists_are_refused() -> None:
    assert expand_hosts("n[1-1000000000]") is None
    assert expand_hosts("n[1-4") is None
    assert expand_hosts("n[4-1]") is None
    assert expand_hosts("r[1-2]n[1-2]") == ["r1n1", "r1n2", "r2n1", "r2n2"]
