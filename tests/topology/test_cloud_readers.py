"""Topology replies of the clouds, whole, elided and damaged."""

from __future__ import annotations

import json

from hpjob.topology.read.recognise import read_text

INSTANCES = [
    {
        "InstanceId": f"i-{k}",
        "NetworkNodes": ["top", f"mid{k // 2}", f"low{k // 2}"],
        "CapacityBlockId": "null" if k else "cr-1",
        "AvailabilityZone": "z1",
    }
    for k in range(4)
]


def test_aws_reply() -> None:
    reading = read_text(json.dumps({"Instances": INSTANCES}))
    found = reading.facts
    assert (reading.kind, found["provider"], found["nodes"], found["complete"]) == ("cloud", "aws", 4, True)
    assert found["same_leaf"] == [["i-0", "i-1"], ["i-2", "i-3"]]
    assert found["accelerator_domains"] == {"cr-1": ["i-0"]}
    assert reading.topology is not None
    assert {switch.level for switch in reading.topology.switches or ()} == {0, 1, 2}


def test_aws_page_cut_and_trailing_comma() -> None:
    whole = json.dumps({"Instances": INSTANCES, "NextToken": "more"})
    assert read_text(whole).facts["complete"] is False
    text = json.dumps({"Instances": INSTANCES}, indent=1)
    assert read_text(text[: text.index("i-3") - 30]).facts["nodes"] == 3
    assert read_text(text.replace('"z1"\n', '"z1",\n')).facts["nodes"] == 4


def test_kubernetes_labels() -> None:
    text = "topology.k8s.aws/network-node-layer-1: nn-a\ntopology.k8s.aws/network-node-layer-2: nn-b\n"
    found = read_text(text).facts
    assert (found["nodes"], found["paths"]) == (0, [["nn-a", "nn-b"]])


def test_gcp_instance_and_table() -> None:
    host = {"name": "vm1", "resourceStatus": {"physicalHost": "/blockx/suby/hostz"}}
    assert read_text(json.dumps(host)).facts["layers_top_to_bottom"] == {"vm1": ["blockx", "suby"]}
    table = "rank hostname physical_host\n0 a /AAA/bbb/001\n8 b /AAA/bbb/002\n16 c /AAA/ccc/003\n"
    found = read_text(table).facts
    assert (found["gpus_per_node"], found["same_leaf"]) == (8, [["a", "b"]])


def test_oci_prefers_the_rdma_fields() -> None:
    data = {
        "customerHPCIslandId": "island",
        "customerNetworkBlock": "rdma",
        "customerLocalBlock": "local",
        "customerHostId": "h1",
    }
    found = read_text(
        json.dumps({"networkBlockId": "other", "rdmaTopologyData": data, "rdmaFabricData": {"planes": 2}})
    ).facts
    assert found["layers_top_to_bottom"] == {"h1": ["island", "rdma", "local"]}
    assert found["planes"] == 2


def test_azure_ports_are_no_slurm_nodes() -> None:
    reading = read_text("SwitchName=ibsw2 Nodes=0x00ab0000000001,0x00ab0000000002\n")
    assert (reading.facts["provider"], reading.facts["nodes"]) == ("azure", None)
    assert read_text("SwitchName=ibsw2 Nodes=n1,n2\n").kind == "slurm"
