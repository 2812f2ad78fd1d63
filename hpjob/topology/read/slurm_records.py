"""Records of Slurm's topology in the forms in which they are met: printed or configured lines, pyslurm's dict."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

RecordKind = Literal["switch", "block", "aggregated", "ring", "torus"]

_KINDS: dict[str, RecordKind] = {
    "switchname": "switch",
    "blockname": "block",
    "aggregatedblock": "aggregated",
    "ringname": "ring",
    "torusname": "torus",
}
_FIELDS = {
    "level": "level",
    "linkspeed": "link_speed",
    "nodes": "nodes",
    "switches": "children",
    "children": "children",
    "blocksize": "size",
    "ringsize": "size",
}
_PAIR = re.compile(r"(?<![A-Za-z0-9_])([A-Za-z]{4,20})=([^\s#]*)")
_COMMENT = re.compile(r"(?:^|(?<=\s))#[^\n]*")
_ORIGINAL = re.compile(r"^[ \t]*#[ \t]*([^\s=]{1,200})=(\S.{0,400})$", re.M)
_KEYS = ("Name", "Block", "Nodes", "Switches", "Children", "Level", "Speed", "Size", "Sizes", "Index")
_KEY = re.compile(rf"=(?=\S|$)(?:{'|'.join(f'(?<={key}=)' for key in _KEYS)})", re.I)
"""Begins with what is rare, so that a long text without records is searched fast."""
_ELISION_MARKS = (".", "…")
_CONTINUED = re.compile(r"\\[ \t]*\n")
_OPEN_LIST = re.compile(r"(\[[0-9,-]*)\n[ \t]*([0-9,-]+\])")
_PYSLURM = re.compile(r"u?['\"]([^'\"]{1,200})['\"]\s*:\s*\{([^{}]{0,2000000})(\}?)")
_END_MARKS = " \t\n.…"


@dataclass
class Record:
    """One switch, block, ring or torus."""

    kind: RecordKind
    name: str
    level: int | None = None
    nodes: str | None = None
    """Host list as written; None = not there."""
    children: str | None = None
    link_speed: int | None = None
    size: int | None = None
    cut: bool = False
    """The text ends inside this record."""
    topology: str | None = None
    """Name of the topology in a YAML file."""


@dataclass
class Records:
    """All records of a text."""

    items: list[Record]
    block_sizes: list[int] | None = None
    original_names: dict[str, str] | None = None
    names_cut: int = 0


def relevant_lines(lines: list[str]) -> str:
    """The lines that hold a key of a record or a comment, with the rest of a list that was wrapped."""
    kept: list[str] = []
    is_open = False
    for line in lines:
        if is_open or ("=" in line and _is_record(line)) or line.lstrip()[:1] in _ELISION_MARKS:
            kept.append(line)
            is_open = line.rstrip().endswith("\\") or (line.count("[") > line.count("]") and not is_open)
        elif line.strip():
            is_open = False
            kept.append("")
    return "\n".join(kept)


def _is_record(line: str) -> bool:
    return _KEY.search(line) is not None or line.lstrip()[:1] == "#"


def line_records(text: str) -> Records:
    """Read ``Key=value`` records of ``scontrol show topology`` and topology.conf, in any order of keys."""
    plain = _CONTINUED.sub("", _COMMENT.sub("", text))
    plain = _OPEN_LIST.sub(r"\1\2", plain)
    found = Records([])
    current: Record | None = None
    pairs = list(_PAIR.finditer(plain))
    for match in pairs:
        key, value = match[1].lower(), match[2].strip("\"'")
        if key in _KINDS:
            current = Record(_KINDS[key], value)
            found.items.append(current)
        elif key == "blocksizes":
            found.block_sizes = [int(part) for part in re.findall(r"[0-9]{1,9}", value)]
        elif current is not None:
            _set(current, key, value)
    if pairs and current is not None and not plain[pairs[-1].end() :].strip(_END_MARKS).count("\n"):
        _mark_end(found, current, plain, pairs[-1])
    names = {record.name for record in found.items}
    found.original_names = {m[1]: m[2].rstrip() for m in _ORIGINAL.finditer(text) if m[1] in names}
    return found


def _set(record: Record, key: str, value: str) -> None:
    """A key that comes again stands in no record; the first value holds."""
    number = int(value) if value.isdecimal() and len(value) < 12 else None
    name = _FIELDS.get(key)
    if name is not None and getattr(record, name) is None:
        setattr(record, name, value if name in ("nodes", "children") else number)


def _mark_end(found: Records, last: Record, plain: str, end: re.Match[str]) -> None:
    """Judge the last record of a text that ends with it."""
    rest = plain[end.end() :]
    touches = not rest.strip(_END_MARKS)
    dots = rest.strip() != "" and touches
    if touches and end[1].lower() in _KINDS and not dots:
        found.items.remove(last)
        found.names_cut += 1
        return
    others = [record for record in found.items if record.kind == last.kind and record is not last]
    in_nodes = touches and end[1].lower() == "nodes"
    lacks_size = in_nodes and last.size is None and bool(others) and all(record.size is not None for record in others)
    lacks_nodes = last.nodes is None and last.children is None
    open_list = any(text is not None and text.count("[") != text.count("]") for text in (last.nodes, last.children))
    lacks_children = last.children is None and (last.level or 0) > 0
    last.cut = lacks_size or lacks_nodes or open_list or lacks_children or dots


def pyslurm_records(text: str) -> Records:
    """Read the repr of pyslurm's ``topology().get()``; lists that were split inside brackets are joined again."""
    found = Records([], original_names={})
    for match in _PYSLURM.finditer(text):
        name, body, closed = match.groups()
        if "switches" not in body and "link_speed" not in body:
            continue
        record = Record("switch", name, cut=not closed)
        record.level = _field_number(body, "level")
        record.link_speed = _field_number(body, "link_speed")
        record.nodes = _field_list(body, "nodes")
        record.children = _field_list(body, "switches")
        found.items.append(record)
    return found


def _field_number(body: str, key: str) -> int | None:
    match = re.search(rf"['\"]{key}['\"]\s*:\s*([0-9]{{1,12}})L?\b", body)
    return int(match[1]) if match else None


def _field_list(body: str, key: str) -> str | None:
    match = re.search(
        rf"['\"]{key}['\"]\s*:\s*(?:\[([^\n]*?)(?:\]\s*(?:,\s*u?['\"]|$)|\s*\Z)|u?['\"]([^'\"]*)['\"])", body
    )
    if match is None:
        return None
    if match[1] is None:
        return match[2] or None
    parts = re.findall(r"u?['\"]([^'\"]*)(?:['\"]|\Z)", match[1])
    return ",".join(parts) or None
