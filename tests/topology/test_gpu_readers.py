"""The other GPU sources: peer access, lists, links, fabric state, AMD and other vendors, NCCL."""

from __future__ import annotations

from hpjob.topology.read.recognise import read_text
from tests.topology import fixtures


def test_peer_access_groups_and_missing_rows() -> None:
    text = "$ nvidia-smi topo -p2p r\n \tGPU0\tGPU1\tGPU2\t\n GPU0\tX\tOK\tCNS\t\n GPU1\tOK\tX\tCNS\t\n"
    whole = read_text(text + " GPU2\tCNS\tCNS\tX\t\n")
    assert whole.kind == "nvsmi_p2p"
    assert whole.facts["p2p_groups"] == [[0, 1]]
    assert whole.facts["capability"] == "r"
    assert whole.facts["status"] == {"OK": 2, "CNS": 4}
    cut = read_text(text)
    assert cut.facts["rows_missing"] == [2]
    assert cut.facts["p2p_groups"] is None


def test_list_with_slices_and_display_card() -> None:
    text = (
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1)\n"
        "GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-2)\n"
        "  MIG 3g.20gb     Device  0: (UUID: MIG-1)\n  MIG 1g.5gb+me     Device  1: (UUID: MIG-2)\n"
        "GPU 2: NVIDIA DGX Display (UUID: GPU-3)\n"
    )
    reading = read_text(text)
    assert reading.kind == "nvsmi_list"
    assert reading.facts["mig_devices"] == {"1": ["3g.20gb", "1g.5gb+me"]}
    assert reading.facts["usable_whole"] == [0]
    assert reading.facts["display_only"] == [2]


def test_link_state_inactive_and_cut() -> None:
    gpu = "GPU {}: NVIDIA H100 NVL (UUID: GPU-{})\n"
    rows = "".join(f"\t Link {k}: 26.562 GB/s\n" for k in range(4))
    reading = read_text(gpu.format(0, 1) + rows + gpu.format(1, 2) + rows)
    assert reading.facts["links"] == {"0": 4, "1": 4}
    cut = read_text(gpu.format(0, 1) + rows + gpu.format(1, 2) + rows[: len(rows) // 2])
    assert cut.facts["links"] == {"0": 4, "1": None}
    down = "NVML: Unable to retrieve NVLink information as all links are inActive\n"
    dead = read_text(gpu.format(0, 1) + down)
    assert dead.facts["links"] == {"0": 0}
    assert dead.topology is not None
    assert dead.topology.nodes[0].islands == ()


def test_far_ends_tell_switch_from_gpu() -> None:
    head = "GPU 0: NVIDIA H100 (UUID: GPU-1)\n"
    remote = "\t Link {}: Remote Device 00000000:{}:00.0: Link {}\n"
    switch = read_text(head + remote.format(0, "07", 33) + remote.format(1, "07", 32))
    assert switch.facts["remote_kind"] == "nvswitch"
    assert switch.facts["remote_links"] == {"0": {"00000000:07:00.0": 2}}
    peer = read_text(head + remote.format(0, "0a", 1) + remote.format(1, "0a", 0))
    assert peer.facts["remote_kind"] == "gpu"


def test_zero_cluster_is_no_domain() -> None:
    def block(uuid: str, clique: str) -> str:
        return f"    Fabric\n        State : Completed\n        CliqueId : {clique}\n        ClusterUUID : {uuid}\n"

    zero = read_text(block("00000000-0000-0000-0000-000000000000", "0"))
    assert zero.facts["multi_node_domain"] is False
    real = "12345678-1234-1234-1234-123456789abc"
    found = read_text(block(real, "3") + block(real, "3"))
    assert found.facts["domains"] == {f"{real}.3": [0, 1]}
    hosts = (
        f"n1: CliqueId : 3\nn2: CliqueId : 3\nn1: ClusterUUID : {real}\nn2: ClusterUUID : {real}\nn3: CliqueId : x\n"
    )
    several = read_text(hosts)
    assert several.facts["domains"] == {f"{real}.3": ["n1", "n2"]}
    assert several.facts["refused"] == ["n3"]


def test_amd_weight_decides_what_is_direct() -> None:
    head = "       GPU0         GPU1         GPU2\n"
    weight = "=== Weight between two GPUs ===\n" + head + "GPU0   0  15  30\nGPU1   15  0  15\nGPU2   30  15  0\n"
    hops = "=== Hops between two GPUs ===\n" + head + "GPU0   0  1  1\nGPU1   1  0  1\nGPU2   1  1  0\n"
    kinds = "=== Link Type between two GPUs ===\n" + head + "GPU0  0 XGMI XGMI\nGPU1  XGMI 0 XGMI\nGPU2  XGMI XGMI 0\n"
    numa = "=== Numa Nodes ===\nGPU[0]\t\t: (Topology) Numa Node: 0\nGPU 1  : (Topology) Numa Node: 1\n"
    reading = read_text(weight + hops + kinds + numa)
    assert reading.kind == "rocm"
    assert reading.facts["weight"] == [15, 30]
    assert reading.facts["hops_by_type"] == {"XGMI": [1]}
    assert reading.facts["numa_of_gpu"] == [0, 1, None]
    assert reading.topology is not None
    assert (reading.topology.nodes[0].islands or ())[0].all_to_all is False


def test_other_vendor_with_boxes() -> None:
    text = (
        "+------+------+------+\n|      | NPU0 | NPU1 |\n+------+------+------+\n"
        "| NPU0 | X    | HCCS |\n| NPU1 | HCCS | X    |\n+------+------+------+\n"
    )
    reading = read_text(text)
    assert reading.kind == "other_vendor"
    assert (reading.facts["gpus"], reading.facts["link_word"]) == (2, "HCCS")
    assert reading.facts["link_islands"] == [[0, 1]]


def test_nccl_switch_pairs_and_ranks() -> None:
    found = read_text(fixtures.nccl_xml()).facts
    assert found["islands"] == [[0, 1, 2, 3]]
    assert (found["linked_pairs"], found["nvswitches"], found["pair_links"]) == (6, 1, {})
    assert found["rank_of_dev"] == [3, 2, 1, 0]
    assert found["same_switch_gpus_and_nics"] == [[[k], [f"mlx5_{k}"]] for k in range(4)]
    direct = read_text(fixtures.nccl_xml(switch=False)).facts
    assert direct["islands"] == [[0, 1], [2, 3]]
    assert direct["pair_links"] == {"0-1": 4, "2-3": 4}


def test_nccl_unknown_where_a_peer_is_missing_or_the_file_is_partial() -> None:
    lost = read_text(fixtures.nccl_xml(switch=False).replace('busid="0000:21:00.0"', 'busid="0000:77:00.0"')).facts
    assert lost["missing_peers"] == ["0000:21:00.0"]
    assert lost["islands"] is None
    partial = read_text(
        '<system version="1"><cpu numaid="0"><pci busid="0000:01:00.0" class="0x030200"/></cpu></system>'
    )
    assert (partial.facts["gpus"], partial.facts["islands"]) == (1, None)


def test_nccl_entities_are_not_expanded() -> None:
    bomb = '<!DOCTYPE s [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;&a;">]><system version="&b;"><cpu numaid="0"/></system>'
    assert read_text(bomb).facts["version"] != "aaaa" * 4


def test_graph_file_is_refused() -> None:
    reading = read_text('<graphs version="1"><graph id="0" pattern="4"></graph></graphs>')
    assert reading.facts == {"is_topology": False, "gpus": None}
    assert reading.topology is None
