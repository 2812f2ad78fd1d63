"""The matrix of ``topo -m``: which cell of which row belongs to which column.

A row is believed only as far as it can be placed: the X has to stand in the row's own column, and a
row that is shorter than the others counts up to its X unless the text ends there.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from hpjob.topology.read.text import Source, is_cut_mark
from hpjob.topology.read.topo_header import (
    GPU,
    INDEXED,
    MAX_COLUMNS,
    TOPO_WORDS,
    Header,
    Vocabulary,
    parse_header,
    split_header,
)
from hpjob.topology.read.topo_row import Row, cells_of, parse_row, unwrapped, words_of

_MAX_CANDIDATES = 8_000
_BEFORE = 8_000
_BEHIND = 4_000_000
_MAX_LINES = 8_000
_MAY_MATTER = re.compile("GPU|NIC|mlx|X|SYS|NODE|PIX|PXB|PHB|Affinity|OK|NS")


@dataclass
class Matrix:
    """The first matrix of a text."""

    columns: list[str]
    affinity: list[str]
    """Names of the columns behind the cells: cpu, numa, gpu_numa, in the order printed."""
    rows: dict[str, Row]
    header_seen: bool
    lines: list[str]
    """Lines before, of and behind the matrix, up to the next one; rows number into it."""
    ends_text: bool
    """Nothing but marks of an elision follows the last row."""
    notes: list[str] = field(default_factory=list)

    @property
    def gpu_columns(self) -> list[int]:
        """GPU indices in the order of the columns, rows without a column last."""
        found = [int(match[1]) for label in self.columns if (match := GPU.fullmatch(label))]
        return found

    @property
    def nic_columns(self) -> list[str]:
        """Labels of NICs in the order of the columns, else of the rows."""
        nics = [label for label in self.columns if not GPU.fullmatch(label)]
        return nics or [label for label in self.rows if not GPU.fullmatch(label)]

    def cell(self, row: str, column: str) -> str | None:
        """Return what ``row`` shows for ``column``, or None where it cannot be told."""
        found = self.rows.get(row)
        if found is None or column not in self._index:
            return None
        position = self._index[column]
        return found.cells[position] if position < len(found.cells) else None

    def __post_init__(self) -> None:
        self._index = {label: position for position, label in enumerate(self.columns)}


def find_matrix(source: Source, words: Vocabulary = TOPO_WORDS) -> Matrix | None:
    """Return the first matrix of the text, or None when no row of one is there."""
    key = ("matrix", words.word.pattern)
    if key not in source.cache:
        source.cache[key] = _find_matrix(source, words)
    found: Matrix | None = source.cache[key]
    return found


def _window(source: Source, words: Vocabulary) -> tuple[list[str], bool]:
    """The lines around the first row or header, and whether they reach the end of the text."""
    for needle in ("GPU", "NIC", "mlx"):
        for begin, line in source.lines_with(needle, _MAX_CANDIDATES):
            if parse_row(line, 0, set(), words) or parse_header(line, words):
                start = source.text.rfind("\n", 0, max(0, begin - _BEFORE)) + 1
                lines = source.text[start : begin + _BEHIND].split("\n")
                whole = len(source.text) <= begin + _BEHIND and len(lines) <= _MAX_LINES
                return lines[:_MAX_LINES], whole
    return [], True


def _find_matrix(source: Source, words: Vocabulary) -> Matrix | None:
    lines, to_end = _window(source, words)
    lines = unwrapped(lines, words)
    header: Header | None = None
    rows: dict[str, Row] = {}
    notes: list[str] = []
    end = len(lines)
    for number, line in enumerate(lines):
        if len(line) > 40_000 or not _MAY_MATTER.search(line):
            continue
        row = parse_row(line, number, set(header[0]) if header else set(), words)
        if row is not None:
            _add_row(rows, row, header, notes)
            continue
        found = parse_header(line, words)
        if found is None:
            if header is not None and not rows:
                header = _joined_header(header, line, words)
            elif rows:
                _continue_row(list(rows.values())[-1], line, number, len(header[0]) if header else 0, words)
        elif not rows:
            header = found
        else:
            end = number
            notes.append("a second matrix follows; only the first one was read")
            break
    if header is None and not rows:
        return None
    return _assemble(header, rows, lines, end, to_end, notes)


def _add_row(rows: dict[str, Row], row: Row, header: Header | None, notes: list[str]) -> None:
    if row.label in rows:
        if row.cells != rows[row.label].cells:
            notes.append(f"row {row.label} stands twice with other cells; the first one was read")
        return
    if not INDEXED.fullmatch(row.label) and not (header and row.label in header[0]) and row.cells.count("X") != 1:
        return
    rows[row.label] = row


def _joined_header(header: Header, line: str, words: Vocabulary) -> Header:
    labels, affinity, leftover = split_header(line.replace("|", " "), words)
    if leftover or not (labels or affinity) or set(labels) & set(header[0]):
        return header
    return [*header[0], *labels], [*header[1], *affinity]


def _continue_row(row: Row, line: str, number: int, width: int, words: Vocabulary) -> None:
    """Append the wrapped rest of a row: a line that begins with a cell."""
    spans = words_of(line) if len(line) < 40_000 else []
    if number != row.number + 1 or len(row.cells) >= width or not spans or not words.words.fullmatch(spans[0][0]):
        return
    rest = cells_of(row.label, line, number, row.start, spans, words)
    if rest is not None and len(row.cells) + len(rest.cells) <= width:
        row.cells.extend(rest.cells)
        row.line, row.tail, row.tokens, row.number = line, rest.tail, rest.tokens, number


def _assemble(
    header: Header | None, rows: dict[str, Row], lines: list[str], end: int, to_end: bool, notes: list[str]
) -> Matrix:
    last = max((row.number for row in rows.values()), default=-1)
    behind = lines[last + 1 : end] if rows else []
    ends_text = to_end and end == len(lines) and all(not line.strip() or is_cut_mark(line) for line in behind)
    columns = list(dict.fromkeys(header[0])) if header else _columns_by_position(rows)
    affinity = header[1] if header else ["cpu", "numa", "gpu_numa"]
    matrix = Matrix(columns, affinity, rows, header is not None, lines[:end], ends_text, notes)
    _distrust(matrix, last)
    return matrix


def _columns_by_position(rows: dict[str, Row]) -> list[str]:
    gpu_rows = {label: row for label, row in rows.items() if GPU.fullmatch(label)}
    width = max((len(row.cells) for row in rows.values()), default=0)
    gpus = max((int(label[3:]) + 1 for label in gpu_rows), default=0)
    usual = Counter(len(row.cells) for row in gpu_rows.values()).most_common(1)
    for row in gpu_rows.values():
        if len(row.cells) != usual[0][0] or (usual[0][1] == 1 < len(gpu_rows)):
            continue  # rows of which no two are alike: no width can be believed
        marks = [at for at, cell in enumerate(row.cells) if cell == "X" or (cell or "").startswith("NV")]
        gpus = max(gpus, max(marks, default=-1) + 1)
    gpus = min(gpus, MAX_COLUMNS)
    return [f"GPU{k}" for k in range(gpus)] + [f"NIC{k}" for k in range(max(0, width - gpus))]


def _distrust(matrix: Matrix, last: int) -> None:
    """Forget cells whose column cannot be told."""
    position = {label: at for at, label in enumerate(matrix.columns)}
    widths = Counter(len(row.cells) for row in matrix.rows.values())
    usual = max(widths, key=lambda width: (widths[width], width), default=0)
    # A header that lacks a GPU in between was damaged, and a row may be as wide as it is by chance.
    complete = matrix.header_seen and matrix.gpu_columns == list(range(len(matrix.gpu_columns)))
    lost = matrix.header_seen and _lost_a_column(matrix)
    for row in matrix.rows.values():
        own = position.get(row.label)
        crosses = [at for at, cell in enumerate(row.cells) if cell == "X"]
        is_last = row.number == last and matrix.ends_text
        if any(at != own for at in crosses) and own is not None:
            matrix.notes.append(f"row {row.label} does not have its X in its own column; its cells were not used")
            row.cells = []
        elif own is not None and own < len(row.cells) and row.cells[own] not in ("X", None):
            matrix.notes.append(f"row {row.label} has no X in its own column; its cells were not used")
            row.cells = []
        elif (lost or len(row.cells) > len(matrix.columns)) and own is not None:
            matrix.notes.append(f"row {row.label} has more cells than there are columns")
            row.cells = row.cells[: own + 1]
        elif len(row.cells) < min(usual, len(matrix.columns)) and not (is_last or row.elided):
            matrix.notes.append(f"row {row.label} is shorter than the others; cells behind its X were not used")
            row.cells = row.cells[: own + 1] if own is not None and own < len(row.cells) else []
        _forget_behind_damage(row, own, len(matrix.columns) if complete else None)
        if is_last and _may_be_cut(row, len(matrix.columns)):
            row.cells[-1] = None


def _lost_a_column(matrix: Matrix) -> bool:
    """Whether a GPU between others has a row but no column: behind it every cell stands one column off."""
    columns = set(matrix.gpu_columns)
    rows = [int(match[1]) for label in matrix.rows if (match := GPU.fullmatch(label))]
    return any(gpu not in columns and gpu < max(columns, default=0) for gpu in rows)


def _forget_behind_damage(row: Row, own: int | None, width: int | None) -> None:
    """A word that no reader knows may be a cell or something between two: what follows is placed only in a full row."""
    if len(row.cells) == width:
        return
    start = own + 1 if own is not None and own < len(row.cells) and row.cells[own] == "X" else 0
    if None in row.cells[start:]:
        row.cells = row.cells[: start + row.cells[start:].index(None)]


def _may_be_cut(row: Row, width: int) -> bool:
    """``NV1`` at the end of a cut text may have been ``NV18``."""
    short = 0 < len(row.cells) < width and row.tail == len(row.line.rstrip())
    return short and re.fullmatch(r"NV[0-9]", row.cells[-1] or "") is not None
