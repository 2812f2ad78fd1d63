"""Forms in which people meet these outputs: other versions of a tool, other options, other ways of pasting."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hpjob.topology.read.ibnetdiscover import parse_fabric
from hpjob.topology.read.recognise import read_text
from hpjob.topology.read.text import Source
from tests.topology import fixtures


def tabs(text: str) -> str:
    """``~`` stands for a tab."""
    return text.replace("~", "\t")


PAIR = tabs("~GPU0~GPU1~CPU Affinity~NUMA Affinity\nGPU0~ X ~NV4~0-31~0\nGPU1~NV4~ X ~32-63~1\n")
OLD_MATRIX = tabs(
    "~GPU0~GPU1~GPU2~mlx4_0~CPU Affinity\nGPU0~ X ~PIX~SOC~PHB~0-7\nGPU1~PIX~ X ~SOC~PHB~0-7\n"
    "GPU2~SOC~SOC~ X ~SOC~8-15\nmlx4_0~PHB~PHB~SOC~ X ~\n"
)
NVL_PAIRS = fixtures.matrix(4, {(0, 1): "NV12", (2, 3): "NV12"}, affinity=["0-31\t0\t\tN/A"] * 4)
MATRICES = {
    "quoted in a mail": ("\n".join("> " + line for line in PAIR.split("\n")), {"nvlink_islands": [[0, 1]]}),
    "with time stamps": ("\n".join("2025-01-01T00:00:00Z " + line for line in PAIR.split("\n")), {"gpus": 2}),
    "as a table": (
        "| | **GPU0** | **GPU1** |\n|---|---|---|\n| **GPU0** | X | NV4 |\n| **GPU1** | NV4 | X |\n",
        {"gpus": 2, "nvlink_islands": [[0, 1]]},
    ),
    "in a string of JSON": (
        '{"topo": "' + PAIR.replace("\t", "\\t").replace("\n", "\\n") + '"}',
        {"nvlink_islands": [[0, 1]], "cpus": {"0-31": [0], "32-63": [1]}},
    ),
    "under watch": ("\x1b[H\x1b[2J\x1b[3JEvery 2.0s: nvidia-smi topo -m\n\n" + PAIR.expandtabs(8), {"gpus": 2}),
    "old driver": (OLD_MATRIX, {"pcie_levels_seen": ["PIX", "SOC"], "near_nics": {
        "0": {"level": "PHB", "nics": ["mlx4_0"]}, "1": {"level": "PHB", "nics": ["mlx4_0"]}, "2": None,
    }}),
    "bridged pairs": (NVL_PAIRS, {"nvlink_islands": [[0, 1], [2, 3]], "all_to_all": True, "pcie_levels_seen": ["SYS"]}),
    "sixteen GPUs": (
        fixtures.matrix(16, fixtures.all_linked(16, "NV6"), affinity=["0-23"] * 16, header="CPU Affinity"),
        {"gpus": 16, "nvlinks_per_pair": [6], "numa_of_gpu": None},
    ),
    "GPUs 4 and 5 only": (PAIR.replace("GPU1", "GPU5").replace("GPU0", "GPU4"), {"nvlink_islands": [[4, 5]]}),
}  # fmt: skip
XGMI_RING = "".join(
    f"=== {title} ===\n       GPU0  GPU1  GPU2  GPU3\n"
    + "".join(f"GPU{a}   " + "  ".join(cell(a, b) for b in range(4)) + "\n" for a in range(4))
    for title, cell in (
        ("Weight between two GPUs", lambda a, b: "0" if a == b else "30" if a + b == 3 else "15"),
        ("Hops between two GPUs", lambda a, b: "0" if a == b else "1"),
        ("Link Type between two GPUs", lambda a, b: "0" if a == b else "XGMI"),
    )
)
AMD_SMI = (
    '[{"gpu":0,"bdf":"0000:0c:00.0","links":[{"gpu":0,"weight":0,"link_type":"SELF","num_hops":0},'
    '{"gpu":1,"weight":15,"link_type":"XGMI","num_hops":1}]},{"gpu":1,"links":[{"gpu":0,"weight":15,'
    '"link_type":"XGMI","num_hops":1},{"gpu":1,"weight":0,"link_type":"SELF","num_hops":0}]}]'
)
ROCM_JSON = (
    '{"card0": {"(Topology) Numa Node": "0"}, "card1": {"(Topology) Numa Node": "1"}, "system": '
    '{"(Topology) Weight between DRM devices 0 and 1": "40", "(Topology) Hops between DRM devices 0 and 1": "2", '
    '"(Topology) Link type between DRM devices 0 and 1": "PCIE"}}'
)
GPU_TEXTS = {
    "some links dead": (
        "GPU 3: Tesla V100 (UUID: GPU-1)\n\t Link 0: 25.781 GB/s\n\t Link 1: <inactive>\n\t Link 2: 25.781 GB/s\n",
        {"links": {"3": 2}},
    ),
    "capabilities": (
        "GPU 0: NVIDIA H100 (UUID: GPU-1)\n\t Link 0, P2P is supported: true\n\t Link 0, Link is supported: true\n"
        "\t Link 1, P2P is supported: true\n",
        {"links": {"0": 2}, "gbytes_per_s_per_link": None},
    ),
    "environment report": ("GPU 0: NVIDIA H100 PCIe\nGPU 1: NVIDIA H100 PCIe\n", {"usable_whole": [0, 1]}),
    "compute instances": (
        "GPU 0: A100 (UUID: GPU-0)\n  MIG 1c.3g.20gb Device 0: (UUID: MIG-GPU-0/1/0)\n",
        {"mig_devices": {"0": ["1c.3g.20gb"]}, "usable_whole": []},
    ),
    "fabric by CSV": (
        "index, fabric.state, fabric.clique_id, fabric.cluster_uuid\n"
        "0, Completed, 5, a1b2c3d4-0000-0000-0000-000000000000\n",
        {"domains": {"a1b2c3d4-0000-0000-0000-000000000000.5": [0]}},
    ),
    "fabric in XML": (
        '<nvidia_smi_log><gpu id="00000000:19:00.0"><fabric><state>Completed</state><status>Success</status>'
        "<cliqueId>7</cliqueId><clusterUuid>a1b2c3d4-0000-0000-0000-000000000000</clusterUuid></fabric></gpu>"
        "<gpu><fabric><state>In Progress</state><cliqueId>0</cliqueId></fabric></gpu></nvidia_smi_log>",
        {"gpus": 2, "state": "Completed", "clique_of_gpu": [7, 0],
         "domains": {"a1b2c3d4-0000-0000-0000-000000000000.7": [0]}},
    ),
    "XGMI ring": (XGMI_RING, {"weight": [15, 30], "xgmi_islands": [[0, 1, 2, 3]]}),
    "amd-smi JSON": (AMD_SMI, {"gpus": 2, "xgmi_islands": [[0, 1]], "weight": [15], "hops_by_type": {"XGMI": [1]}}),
    "rocm-smi JSON": (ROCM_JSON, {"link_types": ["PCIE"], "xgmi_islands": [], "numa_of_gpu": [0, 1]}),
    "boxed table": (
        "│      │ DCU0 │ DCU1 │\n├──────┼──────┼──────┤\n│ DCU0 │ X    │ XHCL │\n│ DCU1 │ XHCL │ X    │\n",
        {"link_word": "XHCL", "link_islands": [[0, 1]]},
    ),
    "NCCL XML from a page": (
        fixtures.nccl_xml().replace("<", "&lt;").replace(">", "&gt;"), {"gpus": 4, "islands": [[0, 1, 2, 3]]}
    ),
    "NVSwitch placeholder": (
        fixtures.nccl_xml().replace("0000:90:00.0", "fffffff:ffff:ff"), {"nvswitches": None, "all_to_all": True}
    ),
}  # fmt: skip
NICS = {
    "ibdev2netdev -v, port down": (
        "0000:12:00.0 mlx5_0 (MT4129 - X) ConnectX-7 fw 28.39 port 1 (DOWN  ) ==> ib0 (Down)\n",
        {"infiniband": ["mlx5_0"], "ip_down": ["mlx5_0"]},
    ),
    "sysfs by device path": (
        "/sys/devices/pci0000:15/0000:16:00.0/infiniband/mlx5_0/ports/1/rate:400 Gb/sec (4X NDR)\n",
        {"rate_gbit": {"mlx5_0": 400}},
    ),
    "sysfs under head": (
        "==> /sys/class/infiniband/mlx5_0/ports/1/rate <==\n200 Gb/sec (4X HDR)\n\n"
        "==> /sys/class/infiniband/mlx5_0/ports/1/state <==\n4: ACTIVE\n",
        {"rate_gbit": {"mlx5_0": 200}, "all_active": True},
    ),
    "ibstatus": (
        "Infiniband device 'mlx5_0' port 1 status:\n\tstate:\t\t 4: ACTIVE\n\trate:\t\t 200 Gb/sec (4X HDR)\n",
        {"active": ["mlx5_0"]},
    ),
    "a router between subnets": (
        'Rt\t1 "R-0002c90300000001"\t\t# "router"\nSwitch\t36 "S-0002c90300000002"\t\t# "leaf" lid 1 lmc 0\n'
        '[1]\t"R-0002c90300000001"[1]\t\t# "router" lid 4 4xEDR\n'
        '[2]\t"H-0002c90300000003"[1](2c90300000004) \t\t# "n1 mlx4_0" lid 3 4xEDR\n',
        {"hca_records": 0, "hcas_of_switch": {"S-0002c90300000002": 1}, "hosts_named": 1, "cables": 2},
    ),
    "blanks for tabs": (fixtures.ib_fabric(units=1).replace("\t", " "), {"leaves": 4, "hosts_named": 3}),
}
NODE = (
    "NodeName=g1 CoresPerSocket=4\n   CPUTot=8 Gres=gpu:h100:8(S:0-1)\n   State=IDLE+DRAIN\n"
    "   Reason=was State=broken [root@2024-01-02T00:00:00]\n"
)
SLURM = {
    "children": ("SwitchName=top Children=s[0-1]\nSwitchName=s0 Nodes=a[1-2]\nSwitchName=s1 Nodes=a[3-4]\n",
                 {"roots": ["top"], "children_of_switch": {"top": 2}}),
    "continued line": ("SwitchName=s0 \\\n   Nodes=a[1-2],\\\na[5-6]\nSwitchName=top Switches=s0\n",
                       {"nodes_per_leaf": {"s0": 4}, "valid": True}),
    "lower case": ("switchname=s0 nodes=a[1-2]\nSWITCHNAME=top SWITCHES=s0 LINKSPEED=100\n",
                   {"roots": ["top"], "link_speed": {"top": 100}}),
    "block over lines": ("BlockName=b1\n   BlockIndex=0 Nodes=n[01-18]\n   BlockSize=18\n", {"blocks": {"b1": 18}}),
    "a key that comes again": ("SwitchName=s0 Level=0 LinkSpeed=1 Nodes=a[1-2]\nlog: Nodes=x Nodes= <pci\n",
                               {"nodes_per_leaf": {"s0": 2}, "nodes": 2}),
    "reason with a state": (NODE, {"state_of_node": {"g1": "IDLE+DRAIN"}, "unusable": ["g1"]}),
    "MIG in Gres": (NODE.replace("gpu:h100:8(S:0-1)", "gpu:1g.10gb:7(S:0)"),
                    {"gpus_of_node": {"g1": 7}, "gpu_types": ["1g.10gb"]}),
    "sinfo with bars": ("NODELIST|CPUS|MEMORY|GRES|STATE\ng[1-2]|96|2000|gpu:h100:8(S:0-1)|idle\n",
                        {"gpus_of_node": {"g1": 8, "g2": 8}}),
    "sinfo -O": ("NODELIST            GRES                STATE\ng1                  gpu:a100:4          drained*\n",
                 {"gpus_of_node": {"g1": 4}, "unusable": ["g1"]}),
    "sinfo --json": ('{"sinfo":[{"node":{"state":["IDLE"]},"nodes":{"nodes":["g1","g2"]},"gres":{"total":"gpu:4"},'
                     '"partition":{"name":"p"}}]}', {"gpus_of_node": {"g1": 4, "g2": 4}, "partitions": ["p"]}),
}  # fmt: skip
GCP = (
    "resourceStatus:\n  physicalHostTopology:\n    block: b\n    cluster: c\n    subblock: s\n"
    "  scheduling: {}\nname: v1\n"
)
CLOUD = {
    "GCP instance": (GCP, {"layers_top_to_bottom": {"v1": ["c", "b", "s"]}, "node_id": "name"}),
    "GKE labels": (
        "cloud.google.com/gce-topology-block: b1\ncloud.google.com/gce-topology-subblock: s1\n"
        "kubernetes.io/hostname: h\n",
        {"layers_top_to_bottom": {"h": ["b1", "s1"]}},
    ),
    "OCI labels": (
        "kubernetes.io/hostname: h\noci.oraclecloud.com/rdma.hpc_island_id: i1\n"
        "oci.oraclecloud.com/rdma.local_block_id: l1\n",
        {"layers_top_to_bottom": {"h": ["i1", "l1"]}},
    ),
}  # fmt: skip
FORMS: dict[str, tuple[str, dict[str, Any]]] = {**MATRICES, **GPU_TEXTS, **NICS, **SLURM, **CLOUD}


@pytest.mark.parametrize("name", FORMS)
def test_form(name: str) -> None:
    text, expected = FORMS[name]
    facts = read_text(text).facts
    assert {key: facts.get(key) for key in expected} == expected


def test_a_ring_offers_its_pairs_and_a_dead_link_is_named() -> None:
    ring = read_text(XGMI_RING).topology
    assert ring is not None
    assert [i.cliques for i in ring.nodes[0].islands or ()] == [((0, 1), (0, 2), (1, 3), (2, 3))]
    assert "GPU 3: link 1 inactive" in read_text(GPU_TEXTS["some links dead"][0]).notes


def test_a_redaction_mark_that_was_cut_and_glued_shows_no_cable() -> None:
    whole = re.sub(r"([SH])-[0-9a-f]{16}", r"\1-fa1e<redacted>", fixtures.ib_fabric(units=1, rails=1, spines=0))
    lines = whole.split("\n")
    at = next(number for number, line in enumerate(lines) if line.startswith("[2]"))
    lines[at] = lines[at].replace("<redacted>", "<red<redacted>")
    before, after = parse_fabric(Source(whole)), parse_fabric(Source("\n".join(lines)))
    assert len(before.cables) == 4
    assert after.cables <= before.cables
    assert set(after.nodes) <= set(before.nodes)


def test_a_wide_row_is_no_row_of_a_table() -> None:
    text = XGMI_RING.replace("GPU3   30  15  15  0\n", "") + "GPU3 X NIC mlx5_0 Link 0: XGMI XGMI\n"
    before = read_text(XGMI_RING).facts
    assert read_text(text).facts["weight"] == before["weight"]


def test_rings_of_a_nccl_file_offer_their_pairs() -> None:
    text = fixtures.nccl_xml(switch=False)
    edge = '<nvlink target="0000:{:02x}:00.0" count="4" tclass="0x030200"/>'
    for gpu, peer in ((0, 2), (2, 0)):
        near = edge.format(0x20 + (gpu ^ 1))
        text = text.replace(near, near + edge.format(0x20 + peer), 1)
    topology = read_text(text).topology
    assert topology is not None
    node = topology.nodes[0]
    assert {(link.a, link.b) for link in node.links or () if link.linked} == {(0, 1), (0, 2), (2, 3)}
    assert [link.linked for link in node.links or () if (link.a, link.b) == (1, 3)] == [False]
    assert [(i.all_to_all, i.cliques) for i in node.islands or ()] == [(False, ((0, 1), (0, 2), (2, 3)))]
    cut = read_text(text[: text.rindex("</cpu>")]).topology
    assert cut is not None
    assert {link.linked for link in cut.nodes[0].links or ()} == {True, None}


def test_an_edge_that_was_moved_to_another_gpu_is_not_believed() -> None:
    text = fixtures.nccl_xml(switch=False)
    reading = read_text(text.replace('target="0000:21:00.0"', 'target="0000:22:00.0"', 1))
    assert reading.topology is not None
    node = reading.topology.nodes[0]
    assert {(link.a, link.b) for link in node.links or () if link.linked} == {(2, 3)}
    assert not any(island.all_to_all for island in node.islands or () if 0 in island.gpus)
    assert any("0-2" in note for note in reading.notes)


@pytest.mark.parametrize(("state", "domains"), [("Completed", 1), ("In Progress", 0)])
def test_a_domain_counts_when_all_its_gpus_have_joined(state: str, domains: int) -> None:
    text = "index, fabric.state, fabric.clique_id, fabric.cluster_uuid\n" + "".join(
        f"{gpu}, {word}, 5, a1b2c3d4-0000-0000-0000-000000000000\n" for gpu, word in enumerate(("Completed", state))
    )
    topology = read_text(text).topology
    assert topology is not None
    assert len(topology.domains or ()) == domains
    assert any("has completed joining" in note for note in topology.notes) is (domains == 0)


def test_a_gpu_whose_number_is_damaged_leaves_the_links_unknown() -> None:
    reading = read_text(fixtures.nccl_xml(switch=False).replace('dev="0" sm', 'dev="0\x17" sm'))
    assert (reading.facts["gpus"], reading.facts["islands"]) == (4, None)
