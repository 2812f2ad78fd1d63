"""NVLink and XGMI edges of a NCCL topology: direct ones, those by NVSwitch, and those that lead nowhere."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

from hpjob.topology.read.graph import Pair, all_linked, islands
from hpjob.topology.read.xml_elements import Element

_PLACEHOLDER = re.compile(r"f+(?::f+){1,3}(?:\.[f0])?", re.I)


@dataclass
class NcclLinks:
    """Edges between the GPUs of one file; GPU numbers as in the facts."""

    gpus: list[int]
    direct: dict[Pair, int] = field(default_factory=dict)
    linked: set[Pair] = field(default_factory=set)
    per_gpu: list[int] = field(default_factory=list)
    switches: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    one_sided: set[Pair] = field(default_factory=set)
    """Direct links that only one of the two GPUs shows; a dump shows each from both."""
    to_itself: bool = False
    kind: Literal["nvlink", "xgmi"] = "nvlink"

    @property
    def islands(self) -> list[list[int]]:
        """Components of two or more GPUs."""
        return islands(self.gpus, self.linked)

    @property
    def complete(self) -> bool:
        """Whether every pair of every island is linked."""
        return all(self.is_complete(group) for group in self.islands)

    @property
    def nvswitches(self) -> int | None:
        """Distinct NVSwitch targets; None = only the placeholder that stands for any."""
        real = {target for target in self.switches if not _PLACEHOLDER.fullmatch(target)}
        return None if self.switches and not real else len(real)

    def is_complete(self, group: list[int]) -> bool:
        """Whether every pair of one island is linked."""
        return all_linked(group, self.linked)


def read_links(gpus: list[Element], pci: list[Element]) -> NcclLinks:
    """Collect the edges of all GPUs of a file."""
    numbers = _numbers(gpus)
    own = {_host(element) + element.get("busid").lower(): numbers[id(element)] for element in gpus}
    bridges = {element.get("busid").lower() for element in pci if element.get("class").startswith("0x0680")}
    found = NcclLinks(gpus=sorted(numbers.values()))
    behind: dict[str, set[int]] = {}
    ends: set[Pair] = set()
    for element in gpus:
        me = numbers[id(element)]
        total = 0
        for edge in _edges(element):
            target, count = edge.get("target").lower(), _count(edge.get("count"))
            if edge.tag == "xgmi":
                found.kind = "xgmi"
            peer = own.get(_host(element) + target)
            if peer == me:
                found.to_itself = True
                continue
            total += count
            if edge.get("tclass").startswith("0x0680") or target in bridges:
                found.switches.add(target)
                behind.setdefault(target, set()).add(me)
            elif peer is None:
                if edge.get("target") not in found.missing:
                    found.missing.append(edge.get("target"))
            else:
                pair = (min(me, peer), max(me, peer))
                ends.add((me, peer))
                found.direct[pair] = max(found.direct.get(pair, 0), count)
        found.per_gpu.append(total)
    found.one_sided = {(a, b) for a, b in ends if (b, a) not in ends}
    found.linked = set(found.direct)
    for members in behind.values():
        found.linked.update(combinations(sorted(members), 2))
    return found


def _numbers(gpus: list[Element]) -> dict[int, int]:
    devs = [next((c.get("dev") for c in element.children if c.tag == "gpu"), "") for element in gpus]
    if all(dev.isdecimal() for dev in devs) and len(set(devs)) == len(devs):
        return {id(element): int(dev) for element, dev in zip(gpus, devs, strict=True)}
    return {id(element): position for position, element in enumerate(gpus)}


def _host(element: Element) -> str:
    """Bus ids repeat across the hosts of one dump."""
    return next((at.get("host_hash") + "/" for at in element.ancestors() if at.tag == "cpu"), "/")


def _edges(element: Element) -> list[Element]:
    """Edges of a device; several ranks on one device repeat the same links, which count once."""
    ranks = [child for child in element.children if child.tag == "gpu"]
    found = [[edge for edge in rank.children if edge.tag in ("nvlink", "xgmi")] for rank in ranks]
    return max(found, key=len, default=[])


def _count(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 6 else 0
