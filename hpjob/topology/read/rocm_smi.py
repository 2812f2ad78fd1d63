"""``rocm-smi --showtopo`` and ``amd-smi topology``: weight, hops and link type between AMD GPUs, NUMA nodes.

Hops say 1 for any XGMI pair, direct or not, so the weight decides what is near: 15 for a direct XGMI link.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hpjob.topology.model import Gpu, Island, Link, Node, Topology
from hpjob.topology.read.graph import Pair, all_linked, islands, largest_cliques
from hpjob.topology.read.reading import LOCAL_NODE, Facts, Reader, Reading
from hpjob.topology.read.rocm_json import Tables, json_tables, looks_like_json
from hpjob.topology.read.text import Source

TITLE = "rocm-smi --showtopo"
DIRECT_XGMI_WEIGHT = 15
_NUMA = re.compile(r"GPU\s*\[?\s*([0-9]{1,4})\s*\]?\s*:+\s*(?::\s*)?\(Topology\)\s*Numa Node\s*:\s*(-?[0-9]+)", re.I)
_LABEL = re.compile(r"GPU([0-9]{1,4})|[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", re.I)
_TITLES = (
    ("weight", re.compile(r"\bweight\b", re.I)),
    ("hops", re.compile(r"\bhops\b", re.I)),
    ("type", re.compile(r"\blink[ _]type\b", re.I)),
    ("other", re.compile(r"bandwidth|access|accessible|coherent|atomics|\bDMA\b|bi-?directional", re.I)),
)
_TITLE_WORDS = (
    "weight", "hops", "link type", "link_type", "bandwidth", "access", "coherent", "atomics", "dma", "directional",
    "numa nodes", "end of rocm", "(topology)",
)  # fmt: skip
"""One of them stands in every line that begins or ends a table."""
_TABLE_END = re.compile(r"numa nodes|end of rocm|\(Topology\)", re.I)
_ANY = re.compile(r"ROCm System Management|between two GPUs|\(Topology\)\s*Numa|(?:WEIGHT|HOPS|LINK TYPE) TABLE", re.I)
_TYPE_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_/]{1,20}")


@dataclass
class _Table:
    kind: str
    columns: list[str] = field(default_factory=list)
    cells: dict[tuple[str, str], str] = field(default_factory=dict)


def confidence(source: Source) -> float:
    """High when a title or a NUMA line of the tool is there."""
    marks = ("rocm system", "between two gpus", "(topology)", " table")
    if looks_like_json(source.text):
        return 0.95
    return 0.95 if any(mark in source.lower for mark in marks) and _ANY.search(source.text) else 0.0


def read(source: Source) -> Reading:
    """Read every table that is there; parts that the text lacks are null."""
    found = json_tables(source.text) if looks_like_json(source.text) else None
    if found is None:
        found = _text_tables(source)
    gpus = sorted(found.gpus)
    linked = _linked(found.types)
    by_type: dict[str, set[int]] = {}
    for pair, word in found.types.items():
        if pair in found.hops:
            by_type.setdefault(word, set()).add(found.hops[pair])
    there = found.there
    facts: Facts = {
        "gpus": len(gpus),
        "link_types": sorted(set(found.types.values())) if "type" in there else None,
        "xgmi_islands": islands(gpus, linked) if "type" in there else None,
        "weight": sorted(set(found.weights.values())) if "weight" in there else None,
        "hops": sorted(set(found.hops.values())) if "hops" in there else None,
        "hops_by_type": None
        if len(gpus) == 1 or not {"type", "hops"} <= there
        else {word: sorted(by_type[word]) for word in sorted(by_type)},
        "numa_of_gpu": [found.numa.get(gpu) for gpu in gpus] if found.numa else None,
    }
    notes = _notes(gpus, found.types, found.weights)
    return Reading(kind="rocm", facts=facts, topology=_topology(gpus, found, linked, notes), notes=tuple(notes))


def _text_tables(source: Source) -> Tables:
    tables = _tables(source)
    numa = {
        int(match[1]): int(match[2])
        for line in source.lines
        if "opology" in line
        for match in _NUMA.finditer(line[:500])
    }
    index = _indices(list(dict.fromkeys(label for table in tables.values() for label in table.columns)))
    return Tables(
        gpus=set(index.values()) | set(numa),
        types=_pairs(tables.get("type"), index),
        weights=_numbers(tables.get("weight"), index),
        hops=_numbers(tables.get("hops"), index),
        numa=numa,
        there=set(tables),
    )


def _tables(source: Source) -> dict[str, _Table]:
    found: dict[str, _Table] = {}
    kind: str | None = None
    table: _Table | None = None
    titled = source.lines_holding(_TITLE_WORDS)
    for number, line in enumerate(source.lines):
        if len(line) > 20_000 or (number not in titled and "GPU" not in line and ":" not in line):
            continue
        words = line.split()
        labelled = bool(words) and _LABEL.fullmatch(words[0]) is not None
        if not labelled and number not in titled:
            continue
        if labelled and (len(words) > 1 or table is None) and _are_labels(words):
            table = _Table(kind or "untitled", words)
            continue
        if table is not None and labelled and len(words) > 1:
            if len(words) <= len(table.columns) + 1:
                _take_row(table, words, found)
            continue
        if number not in titled:
            continue
        title = next((name for name, pattern in _TITLES if pattern.search(line)), None)
        if title is not None and not _TABLE_END.search(line):
            kind, table = title, None
        elif _TABLE_END.search(line):
            kind, table = None, None
    return found


def _are_labels(words: list[str]) -> bool:
    return _LABEL.fullmatch(words[-1]) is not None and all(_LABEL.fullmatch(word) for word in words)


def _take_row(table: _Table, words: list[str], found: dict[str, _Table]) -> None:
    """Add a row; the first table of a kind holds."""
    for column, cell in zip(table.columns, words[1:], strict=False):
        table.cells.setdefault((words[0], column), cell)
    if table.kind == "untitled":
        table.kind = _guess_kind(table)
    found.setdefault(table.kind, table)


def _guess_kind(table: _Table) -> str:
    """A table whose title is lost: words are types, large numbers weights, small ones hops."""
    values = {cell for (row, column), cell in table.cells.items() if row != column}
    if any(not value.isdecimal() for value in values):
        return "type"
    return "weight" if any(int(value) >= 10 for value in values) else ("hops" if values else "untitled")


def _indices(labels: list[str]) -> dict[str, int]:
    numbered = {label: int(match[1]) for label in labels if (match := _LABEL.fullmatch(label)) and match[1]}
    if len(numbered) == len(labels):
        return numbered
    return {label: position for position, label in enumerate(labels)}


def _pairs(table: _Table | None, index: dict[str, int]) -> dict[Pair, str]:
    """Cells off the diagonal by ordered pair."""
    if table is None:
        return {}
    return {
        (index[row], index[column]): cell
        for (row, column), cell in table.cells.items()
        if row in index
        and column in index
        and row != column
        and _TYPE_WORD.fullmatch(cell)
        and cell not in ("N/A", "SELF")
    }


def _numbers(table: _Table | None, index: dict[str, int]) -> dict[Pair, int]:
    if table is None:
        return {}
    return {
        (index[row], index[column]): int(cell)
        for (row, column), cell in table.cells.items()
        if row in index and column in index and row != column and cell.isdecimal() and len(cell) < 10
    }


def _linked(types: dict[Pair, str]) -> set[Pair]:
    """Pairs that say XGMI from one end and not something else from the other."""
    found: set[Pair] = set()
    for (a, b), word in types.items():
        if word.upper() == "XGMI" and types.get((b, a), word).upper() == "XGMI":
            found.add((min(a, b), max(a, b)))
    return found


def _notes(gpus: list[int], types: dict[Pair, str], weights: dict[Pair, int]) -> list[str]:
    if types and not weights and len(gpus) > 2:
        return ["no weight table: which XGMI pairs are direct cannot be told (hops say 1 for all)"]
    return []


def _topology(gpus: list[int], tables: Tables, linked: set[Pair], notes: list[str]) -> Topology | None:
    if not gpus:
        return None
    weights, types = tables.weights, tables.types
    seen = {(min(pair), max(pair)): weight for pair, weight in weights.items()}
    direct = {pair for pair in linked if seen.get(pair, DIRECT_XGMI_WEIGHT) == DIRECT_XGMI_WEIGHT}
    found = tuple(_island(group, direct, seen=bool(weights)) for group in islands(gpus, linked))
    links = tuple(
        Link(a=a, b=b, linked=(a, b) in direct) for a, b in sorted(types) if a < b and (weights or (a, b) not in linked)
    )
    numa = {gpu: node for gpu, node in tables.numa.items() if node >= 0}
    node = Node(
        name=LOCAL_NODE,
        gpus=tuple(Gpu(index=gpu, numa=numa.get(gpu)) for gpu in gpus),
        islands=found if "type" in tables.there else None,
        links=links if "type" in tables.there else None,
    )
    names = ("gpus", "islands", "links")
    sources = {f"nodes.{LOCAL_NODE}.{name}": TITLE for name in names}
    return Topology(nodes=(node,), source=TITLE, notes=tuple(notes), sources=sources)


def _island(group: list[int], direct: set[Pair], *, seen: bool) -> Island:
    """Without weights it cannot be told which pairs are direct."""
    whole = all_linked(group, direct) if seen else None
    return Island(kind="xgmi", gpus=tuple(group), all_to_all=whole, cliques=largest_cliques(group, direct, whole))


READER = Reader(kind="rocm", title=TITLE, confidence=confidence, read=read)
