"""Oracle Cloud: RDMA topology of a host from its metadata service, or of many hosts from the API."""

from __future__ import annotations

import re
from typing import Any

from hpjob.topology.read.cloud_facts import CloudHosts, cloud_reading, is_elided
from hpjob.topology.read.reading import Reader, Reading
from hpjob.topology.read.structured import load_json, load_yaml, walk
from hpjob.topology.read.text import Source

TITLE = "OCI RDMA topology"
_MARKS = (
    "rdmaTopologyData", "HPCIslandId", "hpc-island-id", "hpcIslandId", "LocalBlock", "local-block-id",
    "ocid1.hpcisland", "rdma.hpc_island_id", "rdma.local_block_id",
)  # fmt: skip
_LAYERS = (
    ("customerhpcislandid", "computehpcislandid", "hpcislandid", "hpcisland"),
    ("customernetworkblock", "computenetworkblockid", "networkblockid", "networkblock"),
    ("customerlocalblock", "computelocalblockid", "localblockid", "localblock"),
)
_FABRIC = ("customergpumemoryfabric", "computegpumemoryfabricid", "gpumemoryfabricid", "gpumemoryfabric")
_HOST = ("customerhostid", "computehostid", "hostid", "id", "hostname")
_INSTANCE = ("instanceid",)


def confidence(source: Source) -> float:
    """High when islands or blocks of the RDMA network are there."""
    return 0.93 if any(mark in source.text for mark in _MARKS) else 0.0


def read(source: Source) -> Reading:
    """Read every mapping that has an island or a local block; the RDMA fields win over those of the virtual network."""
    found = CloudHosts("oci", "host_id", complete=not is_elided(source.text))
    loaded = load_json(source.text)
    document, whole = loaded if loaded is not None else (load_yaml(source.text), True)
    found.complete &= whole
    for entry in walk(document):
        fields = {_field(str(key)): value for key, value in entry.items()}
        planes = fields.get("planes")
        if isinstance(planes, int):
            found.planes = planes
        if any(isinstance(fields.get(key), str) for key in (*_LAYERS[0], *_LAYERS[2])):
            _host(fields, found)
        if fields.get("opcnextpage") or fields.get("nextpage"):
            found.complete = False
    return cloud_reading(found, TITLE)


def _field(key: str) -> str:
    """Labels of Kubernetes nodes have the fields' names behind a prefix."""
    return re.sub(r"[^a-z]", "", re.sub(r"^[a-z.]+/(?:rdma\.)?", "", key.lower()))


def _first(fields: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    return next((value for key in keys if isinstance(value := fields.get(key), str) and value), None)


def _host(fields: dict[str, Any], found: CloudHosts) -> None:
    layers = [value for keys in _LAYERS if (value := _first(fields, keys)) is not None]
    host = _first(fields, _HOST)
    if host is None:
        host = _first(fields, _INSTANCE)
        if host is not None:
            found.node_id = "instance_id"
    if host is None:
        found.loose_paths.append(layers)
        return
    found.layers[host] = layers
    fabric = _first(fields, _FABRIC)
    if fabric is not None:
        found.domains.setdefault(fabric, []).append(host)


READER = Reader(kind="cloud", title=TITLE, confidence=confidence, read=read)
