"""The affinity columns behind the cells of ``topo -m``: CPU list, NUMA node, NUMA node of the GPU's memory.

Values may be empty, and then the position on the screen misleads: tabs are counted as in a whole row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

from hpjob.topology.read.topo_matrix import Matrix
from hpjob.topology.read.topo_row import Row

_CPU_LIST = re.compile(r"[0-9]+(?:-[0-9]+(?::[0-9]+)?)?(?:,[0-9]+(?:-[0-9]+(?::[0-9]+)?)?)*")
_NUMA = re.compile(r"[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*")
_TABS = {"cpu": 1, "numa": 2, "gpu_numa": 4}
"""Tabs between the last cell and a value in a row that shows all of them."""
_MAX_SPLITS = 256


@dataclass
class Affinity:
    """Values of one row; None = not shown."""

    cpu: str | None = None
    numa: int | str | None = None
    gpu_numa: int | None = None


def read_affinity(matrix: Matrix, labels: list[str]) -> dict[str, Affinity]:
    """Return the affinity values of the rows named by ``labels``."""
    if not matrix.affinity:
        return {}
    rows = [matrix.rows[label] for label in labels if label in matrix.rows]
    words = {row.label: _tail(row) for row in rows}
    offsets = _whole_row_tabs(matrix, rows, words)
    values = {row.label: _assign(matrix, row, words[row.label], offsets) for row in rows}
    _drop_cut_end(matrix, values, words)
    _split_glued(values)
    return {label: _checked(found) for label, found in values.items()}


def _tail(row: Row) -> list[tuple[str, int, int]]:
    """Words behind the cells; a list that was broken behind a comma is joined."""
    found: list[tuple[str, int, int]] = []
    for match in re.finditer(r"[^\s|]+", row.line[row.tail :]):
        begin, end = match.start() + row.tail, match.end() + row.tail
        if found and found[-1][0].endswith(",") and match[0][0].isdigit():
            found[-1] = (found[-1][0] + match[0], found[-1][1], end)
        else:
            found.append((match[0], begin, end))
    return found


def _tabs_before(row: Row, begin: int) -> int | None:
    """Tabs between the last cell and a column, also where they were expanded to blanks of eight."""
    gap = row.line[row.tail : begin]
    if "\t" in gap:
        return gap.count("\t")
    starts = [span[0] - row.start for span, cell in zip(row.tokens, row.cells, strict=False) if cell != "X"]
    if any(start % 8 for start in starts) or (begin - row.start) % 8:
        return None
    return (begin - row.start) // 8 - (row.tail - row.start) // 8


def _whole_row_tabs(matrix: Matrix, rows: list[Row], words: dict[str, list[tuple[str, int, int]]]) -> dict[str, int]:
    for row in rows:
        tail = words[row.label]
        if len(tail) == len(matrix.affinity):
            tabs = [_tab_distance(row, tail, at) for at in range(len(tail))]
            if all(tab is not None for tab in tabs) and tabs == sorted(set(tabs), key=lambda tab: tab or 0):
                return {name: tab for name, tab in zip(matrix.affinity, tabs, strict=True) if tab is not None}
    standard = {name: _TABS[name] for name in matrix.affinity}
    return standard if list(standard.values()) == sorted(standard.values()) else {}


def _tab_distance(row: Row, tail: list[tuple[str, int, int]], at: int) -> int | None:
    """Tabs between the last cell and the value ``at``, passing the values between."""
    total = 0
    behind = row.tail
    for _, begin, end in tail[: at + 1]:
        gap = row.line[behind:begin]
        if "\t" in gap:
            total += gap.count("\t")
        else:
            if _tabs_before(row, begin) is None:
                return None
            total += (begin - row.start) // 8 - (behind - row.start) // 8
        behind = end
    return total


def _assign(matrix: Matrix, row: Row, tail: list[tuple[str, int, int]], offsets: dict[str, int]) -> dict[str, str]:
    names = matrix.affinity
    if len(tail) >= len(names) or not matrix.header_seen:
        return {name: word for name, (word, _, _) in zip(names, tail, strict=False)}
    by_tabs = {tabs: name for name, tabs in offsets.items()}
    found: dict[str, str] = {}
    for at, (word, _, _) in enumerate(tail):
        distance = _tab_distance(row, tail, at)
        if distance is None or distance not in by_tabs:
            return _by_shape(names, [word for word, _, _ in tail])
        found[by_tabs[distance]] = word
    return found


def _by_shape(names: list[str], words: list[str]) -> dict[str, str]:
    """Name values by what they look like; a bare number could be either and is left out."""
    found: dict[str, str] = {}
    if words and ("-" in words[0] or "," in words[0]) and names[:1] == ["cpu"]:
        found["cpu"] = words[0]
    if len(words) == len(names) - 1 and words[-1] == "N/A" and names[-1] == "gpu_numa":
        found["gpu_numa"] = words[-1]
    if len(words) > 1 and "cpu" in found and words[1].isdecimal() and len(names) > 1 and names[1] == "numa":
        found["numa"] = words[1]
    return found


def _drop_cut_end(
    matrix: Matrix, values: dict[str, dict[str, str]], words: dict[str, list[tuple[str, int, int]]]
) -> None:
    """Forget a value that touches the end of a cut text: more digits may have followed."""
    if not matrix.ends_text or not matrix.rows:
        return
    last = max(matrix.rows.values(), key=lambda row: row.number)
    missing = [label for label in matrix.columns if label not in matrix.rows]
    found = values.get(last.label)
    if found is None:
        return
    short = len(found) < max((len(other) for other in values.values()), default=0)
    if (missing or short or last.elided) and words[last.label]:
        end_word = words[last.label][-1][0]
        for name in [name for name, word in found.items() if word == end_word and word != "N/A"]:
            if name == list(found)[-1]:
                del found[name]


def _split_glued(values: dict[str, dict[str, str]]) -> None:
    """Part ``64-950`` into ``64-95`` and NUMA 0 where only one split fits the other rows."""
    lists = {found["cpu"] for found in values.values() if "cpu" in found}
    suspects = sorted({found["cpu"] for found in values.values() if "cpu" in found and "numa" not in found})
    has_numa = any("numa" in found for found in values.values())
    if not suspects or not (has_numa or _clash(sorted(lists))):
        return
    options = [_splits(text) for text in suspects]
    count = 1
    for option in options:
        count *= len(option)
    if count > _MAX_SPLITS:
        return
    fixed = {found["cpu"]: found["numa"] for found in values.values() if "cpu" in found and "numa" in found}
    fitting = [choice for choice in product(*options) if _fits(choice, fixed)]
    if len(fitting) != 1:
        for found in values.values():
            if found.get("cpu") in suspects and len(fitting) > 1 and _clash(sorted(lists)):
                del found["cpu"]
        return
    chosen = dict(zip(suspects, fitting[0], strict=True))
    for found in values.values():
        if found.get("cpu") in chosen and "numa" not in found:
            cpu, numa = chosen[found["cpu"]]
            found["cpu"] = cpu
            if numa is not None:
                found["numa"] = numa


def _splits(text: str) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = [(text, None)] if expand_cpus(text) else []
    digits = len(text) - len(text.rstrip("0123456789"))
    for width in (1, 2):
        if width < digits and expand_cpus(text[:-width]):
            numa = text[-width:]
            if numa == str(int(numa)):
                found.append((text[:-width], numa))
    return found


def _fits(choice: tuple[tuple[str, str | None], ...], fixed: dict[str, str]) -> bool:
    pairs = [*choice, *fixed.items()]
    known = [numa for _, numa in pairs if numa is not None]
    if known and len(known) != len(pairs):
        return False
    numa_of = dict(pairs)
    if _clash(sorted(numa_of)):
        return False
    return all(numa is None or numa_of[cpu] == numa for cpu, numa in pairs)


def _clash(lists: list[str]) -> bool:
    """Whether two different CPU lists overlap."""
    seen: set[int] = set()
    for text in lists:
        cpus = expand_cpus(text)
        if cpus & seen:
            return True
        seen |= cpus
    return False


def expand_cpus(text: str) -> set[int]:
    """CPUs of a list; empty for a damaged one."""
    if not _CPU_LIST.fullmatch(text):
        return set()
    cpus: set[int] = set()
    for part in text.split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        low, high = int(first), int(last or first)
        if high < low or high > 65_536 or (step and int(step) < 1):
            return set()
        cpus.update(range(low, high + 1, int(step or 1)))
    return cpus


def _checked(found: dict[str, str]) -> Affinity:
    cpu = found.get("cpu", "")
    numa = found.get("numa", "")
    memory = found.get("gpu_numa", "")
    return Affinity(
        cpu=cpu if expand_cpus(cpu) else None,
        numa=int(numa) if numa.isdecimal() else (numa if _NUMA.fullmatch(numa) else None),
        gpu_numa=int(memory) if memory.isdecimal() else None,
    )
