"""The NVML reader against the binding itself: only the driver's own functions are replaced."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from hpjob.topology.detect.host import short_busid
from hpjob.topology.detect.nvml import nvml_topology

NOT_SUPPORTED, FUNCTION_NOT_FOUND = 3, 13
NO_LINK_FROM = 18
UUID = bytes(range(16))


class Driver:
    """Functions of ``libnvidia-ml.so`` for GPUs behind NVSwitch; outputs are written through their references."""

    def __init__(
        self, count: int = 2, *, domain: bytes = bytes(16), dead: int | None = None, mig: bool = False
    ) -> None:
        self.count, self.domain, self.dead, self.mig = count, domain, dead, mig
        self.health = 2
        self.missing: set[str] = set()
        self.asked: set[str] = set()

    def function(self, name: str) -> Callable[..., int]:
        self.asked.add(name)
        found = getattr(self, name.removesuffix("_v2").removesuffix("_v3"), None)
        if found is None or name in self.missing:
            pynvml = importlib.import_module("pynvml")
            raise pynvml.NVMLError(FUNCTION_NOT_FOUND)
        return found  # type: ignore[no-any-return]

    def nvmlInitWithFlags(self, flags: Any) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetCount(self, out: Any) -> int:
        out._obj.value = self.count
        return 0

    def nvmlDeviceGetHandleByIndex(self, index: Any, out: Any) -> int:
        self.handles = getattr(self, "handles", {})
        self.handles[id(out._obj)] = index.value
        return 0

    def index(self, handle: Any) -> int:
        return int(self.handles[id(handle)])

    def nvmlDeviceGetName(self, handle: Any, text: Any, size: Any) -> int:
        text.value = b"NVIDIA H200" if id(handle) in self.handles else b"NVIDIA H200 MIG 3g.71gb"
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, out: Any) -> int:
        out._obj.total = 141 * 2**30
        return 0

    def nvmlDeviceGetPciInfo(self, handle: Any, out: Any) -> int:
        out._obj.busId = f"00000000:0{self.index(handle)}:06.0".encode()
        return 0

    def nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        current._obj.value = int(self.mig and self.index(handle) == 0)
        return 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, out: Any) -> int:
        out._obj.value = 2
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, out: Any) -> int:
        return 0 if index.value == 0 else NOT_SUPPORTED

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int, out: Any) -> int:
        out._obj.value = int(self.index(handle) != self.dead)
        return 0 if link < NO_LINK_FROM else NOT_SUPPORTED

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: Any, link: int, out: Any) -> int:
        out._obj.busId = b"00000000:C5:00.0"
        return 0

    def nvmlDeviceGetP2PStatus(self, first: Any, second: Any, index: int, out: Any) -> int:
        out._obj.value = 5 if self.dead in (self.index(first), self.index(second)) else 0
        return 0

    def nvmlDeviceGetTopologyCommonAncestor(self, first: Any, second: Any, out: Any) -> int:
        out._obj.value = 50
        return 0

    def nvmlDeviceGetGpuFabricInfoV(self, handle: Any, out: Any) -> int:
        out._obj.clusterUuid[:] = self.domain
        out._obj.cliqueId, out._obj.state, out._obj.healthMask = 7, 3, self.health
        return 0

    def nvmlDeviceGetGpuFabricInfo(self, handle: Any, out: Any) -> int:
        out._obj.clusterUuid[:] = self.domain
        out._obj.cliqueId, out._obj.state = 7, 3
        return 0


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Driver], None]:
    """Put a driver below the binding."""
    pynvml = importlib.import_module("pynvml")

    def put(driver: Driver) -> None:
        monkeypatch.setattr(pynvml, "_LoadNvmlLibrary", lambda: None)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", driver.function)

    return put


def test_gpus_links_and_the_zero_uuid(install: Callable[[Driver], None]) -> None:
    driver = Driver()
    install(driver)
    found = nvml_topology("n1")
    assert found is not None
    node = found.nodes[0]
    assert [(gpu.model, gpu.memory_gib, gpu.pci, gpu.mig) for gpu in node.gpus] == [
        ("NVIDIA H200", 141.0, "0000:00:06.0", ()),
        ("NVIDIA H200", 141.0, "0000:01:06.0", ()),
    ]
    assert [(link.linked, link.count, link.pcie_level) for link in node.links or ()] == [(True, 18, "SYS")]
    assert [island.all_to_all for island in node.islands or ()] == [True]
    assert found.domains == ()
    assert not found.notes
    assert "nvmlDeviceGetP2PStatus" in driver.asked


@pytest.mark.parametrize("missing", [set(), {"nvmlDeviceGetGpuFabricInfoV"}])
def test_a_domain_beyond_the_node(install: Callable[[Driver], None], missing: set[str]) -> None:
    driver = Driver(domain=UUID)
    driver.missing, driver.health = missing, 1
    install(driver)
    found = nvml_topology("n1")
    assert found is not None
    assert [domain.name for domain in found.domains or ()] == ["00010203-0405-0607-0809-0a0b0c0d0e0f.7"]
    assert any("bandwidth degraded" in note for note in found.notes) is not bool(missing)


def test_a_gpu_with_dead_links_and_a_sliced_one(install: Callable[[Driver], None]) -> None:
    install(Driver(3, dead=2, mig=True))
    found = nvml_topology("n1")
    assert found is not None
    node = found.nodes[0]
    assert [island.gpus for island in node.islands or ()] == [(0, 1)]
    assert [(link.a, link.b) for link in node.links or () if link.linked is False] == [(0, 2), (1, 2)]
    assert [gpu.mig for gpu in node.gpus] == [("3g.71gb",), (), ()]


def test_an_old_driver_leaves_its_facts_unknown(install: Callable[[Driver], None]) -> None:
    driver = Driver()
    driver.missing = {
        "nvmlDeviceGetP2PStatus", "nvmlDeviceGetMigMode", "nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetGpuFabricInfo",
        "nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetPciInfo_v3",
    }  # fmt: skip
    install(driver)
    found = nvml_topology("n1")
    assert found is not None
    node = found.nodes[0]
    assert [gpu.mig for gpu in node.gpus] == [None, None]
    assert [(link.linked, link.pcie_level) for link in node.links or ()] == [(None, None)]
    assert node.islands is None
    assert found.domains is None


def test_bus_ids_as_sysfs_names_them() -> None:
    assert short_busid("00000000:3B:00.0") == "0000:3b:00.0"
    assert short_busid("00010000:01:00.0") == "10000:01:00.0"
