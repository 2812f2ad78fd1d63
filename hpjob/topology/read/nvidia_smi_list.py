"""``nvidia-smi -L``: GPUs, MIG slices and display cards."""

from __future__ import annotations

import re

from hpjob.topology.model import Gpu, Node, Topology
from hpjob.topology.read.nvidia_smi_gpus import GpuLines, gpu_blocks
from hpjob.topology.read.reading import LOCAL_NODE, Facts, Reader, Reading
from hpjob.topology.read.text import Source

TITLE = "nvidia-smi -L"
_MIG = re.compile(r"\bMIG\s+(\S+)\s+Device\s+([0-9]+)\s*:")
_BARE_GPU = re.compile(r"^[ \t]*GPU[ \t]+[0-9]{1,4}[ \t]*:[ \t]*(?:NVIDIA|Tesla|GeForce|Quadro|AMD)\b", re.M)
"""As environment reports print it, without the UUID."""
_ANY_GPU = re.compile(r"(?:^|[\s>|:\]])GPU[ \t]+[0-9]{1,4}[ \t]*:.{0,200}UUID", re.M)


def confidence(source: Source) -> float:
    """High when GPU lines carry UUIDs and no link lines follow."""
    if "GPU" not in source.text:
        return 0.0
    if "UUID" not in source.text or not _ANY_GPU.search(source.text):
        return 0.4 if _BARE_GPU.search(source.text) else 0.0
    if "NVLink" in source.text or (
        "Link" in source.text and re.search(r"^[^\w\n]{0,40}Link[ \t]+[0-9]+[ \t]*[:,]", source.text, re.M)
    ):
        return 0.3
    return 0.85


def read(source: Source) -> Reading:
    """Read every GPU line."""
    blocks = gpu_blocks(source)
    slices = {block.index: _profiles(block) for block in blocks}
    display = [block.index for block in blocks if "display" in block.name.lower()]
    facts: Facts = {
        "gpus_shown": [block.index for block in blocks],
        "mig_devices": {str(index): profiles for index, profiles in slices.items() if profiles},
        "display_only": display,
        "usable_whole": [block.index for block in blocks if not slices[block.index] and block.index not in display],
    }
    gpus = tuple(
        Gpu(index=b.index, model=b.name or None, mig=tuple(slices[b.index]), display=b.index in display) for b in blocks
    )
    node = Node(name=LOCAL_NODE, gpus=gpus)
    topology = Topology(nodes=(node,), source=TITLE, sources={f"nodes.{LOCAL_NODE}.gpus": TITLE})
    return Reading(kind="nvsmi_list", facts=facts, topology=topology)


def _profiles(block: GpuLines) -> list[str]:
    found: dict[int, str] = {}
    for line in block.lines:
        match = _MIG.search(line) if "MIG" in line and len(line) < 2000 else None
        if match:
            found.setdefault(int(match[2]), match[1])
    return list(found.values())


READER = Reader(kind="nvsmi_list", title=TITLE, confidence=confidence, read=read)
