"""``nvidia-smi nvlink``: links of each GPU, their speed (``-s``) and their far ends (``-R``, ``-p``)."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from hpjob.topology.model import Gpu, Node, Topology
from hpjob.topology.read.nvidia_smi_gpus import GPU_LINE, GpuLines, gpu_blocks
from hpjob.topology.read.reading import LOCAL_NODE, Facts, Reader, Reading
from hpjob.topology.read.text import Source, is_cut_mark

TITLE = "nvidia-smi nvlink"
_LINK = re.compile(r"\bLink\s+([0-9]{1,3})\s*[:,]\s*(.*)")
_SPEED = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*GB/s")
_REMOTE = re.compile(
    r"(?:Remote Device\s+)?([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])(?:\s*:\s*Link\s+([0-9]{1,3}))?"
)
_INACTIVE = re.compile(r"inactive", re.I)
_ANY_LINK = re.compile(r"^[^\w\n]{0,40}Link[ \t]+[0-9]{1,3}[ \t]*[:,]")
_MAX_CANDIDATES = 20_000
_ROW_BEGUN = re.compile(r"\bLink?\s*[0-9]*$|\bL(?:in?)?$")
_PLACEHOLDER = re.compile(r"F+:FF:FF\.0", re.I)


@dataclass
class _Links:
    speeds: dict[int, float] = field(default_factory=dict)
    remote: dict[int, tuple[str, int | None]] = field(default_factory=dict)
    rows: set[int] = field(default_factory=set)
    inactive: bool = False
    dead: set[int] = field(default_factory=set)
    """Links that are said to be inactive while others of the GPU are not."""
    cut: bool = False


def confidence(source: Source) -> float:
    """High when GPU lines are followed by link lines, or by the text that none is active."""
    if "Link" not in source.text or "GPU" not in source.text:
        return 0.0
    rows = any(_ANY_LINK.match(line) for _, line in source.lines_with("Link", _MAX_CANDIDATES))
    if rows and re.search(r"GPU\s+[0-9]+\s*:", source.text):
        return 0.95
    if "all links are inactive" in source.lower:
        return 0.95
    return 0.2 if rows else 0.0


def read(source: Source) -> Reading:
    """Read every link row."""
    blocks = gpu_blocks(source)
    links = {block.index: _links(block) for block in blocks}
    if blocks:
        _mark_cut(source, blocks[-1], links)
    speeds = Counter(speed for found in links.values() for speed in found.speeds.values())
    remote_seen = any(found.remote for found in links.values())
    facts: Facts = {
        "gpus_shown": [block.index for block in blocks],
        "links": {str(gpu): None if found.cut else len(found.rows) for gpu, found in links.items()},
        "gbytes_per_s_per_link": speeds.most_common(1)[0][0] if speeds else None,
        "remote_links": {str(gpu): _remote_counts(found) for gpu, found in links.items()} if remote_seen else None,
        "remote_kind": _remote_kind(links) if remote_seen else None,
    }
    notes = [_inactive_note(gpu, found) for gpu, found in links.items() if found.inactive]
    if len(speeds) > 1:
        notes.append(f"links differ in speed: {', '.join(f'{speed:g}' for speed in sorted(speeds))} GB/s")
    gpus = tuple(Gpu(index=block.index, model=block.name or None) for block in blocks)
    node = Node(name=LOCAL_NODE, gpus=gpus, islands=_no_islands(links))
    topology = Topology(nodes=(node,), source=TITLE, notes=tuple(notes), sources={f"nodes.{LOCAL_NODE}.gpus": TITLE})
    return Reading(kind="nvlink", facts=facts, topology=topology, notes=tuple(notes))


def _inactive_note(gpu: int, found: _Links) -> str:
    if not found.rows:
        return f"GPU {gpu} says that its links are inactive"
    return f"GPU {gpu}: link {', '.join(map(str, sorted(found.dead)))} inactive"


def _links(block: GpuLines) -> _Links:
    found = _Links()
    for line in block.lines:
        match = _LINK.search(line) if "Link" in line and len(line) < 2000 else None
        if match is None:
            found.inactive |= bool(_INACTIVE.search(line[:2000]))
            continue
        link, rest = int(match[1]), match[2]
        if _INACTIVE.search(rest):
            found.inactive = True
            found.dead.add(link)
            continue
        speed = _SPEED.search(rest)
        remote = _REMOTE.search(rest)
        if speed:
            found.speeds[link] = float(speed[1])
        if remote and (remote[2] is not None or "Remote" not in rest):
            found.remote[link] = (remote[1], None if remote[2] is None else int(remote[2]))
        found.rows.add(link)
    return found


def _mark_cut(source: Source, last: GpuLines, links: dict[int, _Links]) -> None:
    """The last GPU is cut when it has fewer rows than the others, or ends in dots or inside a line."""
    found = links[last.index]
    most = max(len(other.rows) for other in links.values())
    lines = [line for line in source.lines if line.strip()]
    end = lines[-1] if lines else ""
    dots = end.strip().endswith(("...", "…")) or (is_cut_mark(end) and bool(last.lines))
    row = _LINK.search(end)
    if row:
        inside = not _whole_row(row[2], found)
    else:
        inside = bool(_ROW_BEGUN.search(end) and last.lines) or bool(GPU_LINE.search(end) and not found.inactive)
    found.cut = dots or inside or (len(found.rows) < most and not found.inactive)


def _whole_row(rest: str, found: _Links) -> bool:
    if _INACTIVE.search(rest) or _SPEED.search(rest):
        return True
    remote = _REMOTE.search(rest)
    if remote:
        return remote[2] is not None or "Remote" not in rest
    return bool(re.search(r":\s*\S+|\b(?:true|false|yes|no)\b", rest)) and not rest.startswith("Remote")


def _remote_counts(found: _Links) -> dict[str, int] | None:
    if found.cut:
        return None
    return dict(sorted(Counter(device for device, _ in found.remote.values()).items()))


def _remote_kind(links: dict[int, _Links]) -> str:
    for found in links.values():
        highest = max(found.rows, default=0)
        for device, number in found.remote.values():
            if _PLACEHOLDER.fullmatch(device) or (number is not None and number > highest and not found.cut):
                return "nvswitch"
    return "gpu"


def _no_islands(links: dict[int, _Links]) -> tuple[()] | None:
    """Known to have none only when every GPU says that its links are inactive."""
    return () if links and all(found.inactive and not found.rows for found in links.values()) else None


READER = Reader(kind="nvlink", title=TITLE, confidence=confidence, read=read)
