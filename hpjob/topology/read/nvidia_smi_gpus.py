"""Lines that name a GPU in ``nvidia-smi -L`` and ``nvidia-smi nvlink``, with the lines below each."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hpjob.topology.read.text import Source

GPU_LINE = re.compile(r"(?:^|[\s>|:\]])GPU\s+([0-9]{1,4})\s*:\s*(\S.{0,200})")
_UUID = re.compile(r"\s*\(UUID:.*")


@dataclass
class GpuLines:
    """One GPU of the listing."""

    index: int
    name: str
    lines: list[str] = field(default_factory=list)


def gpu_blocks(source: Source) -> list[GpuLines]:
    """Return the GPUs in the order of the text, each with the lines up to the next one."""
    found: list[GpuLines] = []
    seen: dict[int, GpuLines] = {}
    current: GpuLines | None = None
    for line in source.lines:
        match = GPU_LINE.search(line) if ("GPU " in line or "GPU\t" in line) and len(line) < 2000 else None
        if match and "(Topology)" not in line:
            index = int(match[1])
            if index in seen:
                current = seen[index]
                continue
            current = GpuLines(index, _UUID.sub("", match[2]).strip())
            seen[index] = current
            found.append(current)
        elif current is not None:
            current.lines.append(line)
    return found
