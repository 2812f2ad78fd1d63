"""One line of a ``topo`` matrix: a label and the cells behind it; and lines that a terminal broke."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpjob.topology.read.topo_header import DEVICE, INDEXED, MAX_COLUMNS, TOPO_WORDS, Vocabulary, parse_header

_STOPS_CELLS = re.compile(r"[0-9<#(/-]|N/A")
_HAS_WORD = re.compile(r"[A-Za-z0-9]")
_NEAR = 300
"""Lines in which the header of the first row is looked for."""
_LEAST_WIDTH = 40
"""Columns of a terminal; a shorter header was not broken."""
ELLIPSIS = re.compile(r"\.\.\.|…|\[?snip|\[?truncated", re.I)


@dataclass
class Row:
    """One line of the matrix."""

    label: str
    line: str
    number: int
    start: int
    """Column of the label in the line."""
    cells: list[str | None]
    """None = a word that could not be read."""
    tail: int
    """Column behind the last cell."""
    tokens: list[tuple[int, int]]
    """Spans of the cells' words in the line."""
    elided: bool = False
    """The author marked that the row goes on."""


def parse_row(line: str, number: int, known: set[str], words: Vocabulary = TOPO_WORDS) -> Row | None:
    """Read a row: a label followed by at least one cell."""
    if len(line) > 40_000:
        return None
    spans = words_of(line)
    for position, (word, start, end) in enumerate(spans[:12]):
        label = word.rstrip(":").replace("\ufffd", "")
        glued = words.glued_row.fullmatch(word)
        if glued:
            inner = [(glued[2], start + len(glued[1]), end), *spans[position + 1 :]]
            return cells_of(glued[1], line, number, start, inner, words)
        indexed = bool(INDEXED.fullmatch(label))
        if not (indexed or label in known or DEVICE.fullmatch(label)):
            continue
        following = [bool(words.words.fullmatch(w)) for w, _, _ in spans[position + 1 : position + 3]]
        if following[:1] == [True] or (indexed and following[1:] == [True]):
            return cells_of(label, line, number, start, spans[position + 1 :], words)
        if indexed and position + 1 < len(spans) and INDEXED.fullmatch(spans[position + 1][0]):
            return None  # two labels in a row: a header, perhaps with the rest of a row glued to it
    return None


def words_of(line: str) -> list[tuple[str, int, int]]:
    """Words of a line with where each begins and ends."""
    return [(match[0], match.start(), match.end()) for match in re.finditer(r"[^\s|]+", line)]


def cells_of(
    label: str, line: str, number: int, start: int, spans: list[tuple[str, int, int]], words: Vocabulary
) -> Row | None:
    """Read cells up to the first word that is none; None = there is no cell."""
    cells: list[str | None] = []
    places: list[tuple[int, int]] = []
    elided = False
    for word, begin, end in spans:
        if words.words.fullmatch(word):
            pieces = words.word.findall(word)
            cells.extend(pieces)
            places.extend([(begin, end)] * len(pieces))
        elif ELLIPSIS.match(word):
            elided = True
            break
        elif not _HAS_WORD.search(word) and not _STOPS_CELLS.match(word):
            continue
        elif _STOPS_CELLS.match(word) or len(cells) > MAX_COLUMNS:
            break
        else:
            cells.append(None)
            places.append((begin, end))
    while cells and cells[-1] is None:
        cells.pop()
        places.pop()
    if not cells:
        return None
    return Row(label, line, number, start, cells, places[-1][1], places, elided)


def unwrapped(lines: list[str], words: Vocabulary) -> list[str]:
    """Join lines that a terminal broke at its width, inside words too; the header tells the width."""
    near = lines[: min(_NEAR, len(lines) - 1)]
    first = next((at for at, line in enumerate(near) if len(line) >= _LEAST_WIDTH and parse_header(line, words)), None)
    width = len(lines[first]) if first is not None else 0
    if first is None or not _goes_on(lines[first + 1], words):
        return lines
    joined = lines[:first]
    piece = -1
    for line in lines[first:]:
        if piece == width and len(line) <= width and _goes_on(line, words):
            joined[-1] += line
        else:
            joined.append(line)
        piece = len(line)
    return joined


def _goes_on(line: str, words: Vocabulary) -> bool:
    """Whether a line is no beginning of anything: no row, no header, not empty."""
    label = next(iter(line.split(None, 1)), "")
    named = INDEXED.match(label) or (DEVICE.fullmatch(label) and not words.words.fullmatch(label))
    begins = named and parse_row(line, 0, set(), words)
    return bool(label) and not begins and not ("GPU0" in line and parse_header(line, words))
