"""Host lists as Slurm prints them, expanded in the order written, tolerant of damage and of any size.

:func:`hpjob.core.hostlist.expand` raises on a damaged list; a reader has to tell "cut" from "none".
"""

from __future__ import annotations

import re

MAX_HOSTS = 300_000
"""Names that one list may stand for."""
_PART = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def split_top_level(text: str) -> list[str]:
    """Cut a list at the commas outside brackets."""
    pieces: list[str] = []
    depth = 0
    start = 0
    for at, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and depth <= 0:
            pieces.append(text[start:at])
            start = at + 1
    pieces.append(text[start:])
    return [piece.strip() for piece in pieces if piece.strip()]


def expand_hosts(text: str) -> list[str] | None:
    """Return the names of a list in the order written; None = cut, damaged or absurdly large."""
    if "[" not in text and "]" not in text:
        return [piece.strip() for piece in text.split(",") if piece.strip()]
    if text.count("[") != text.count("]"):
        return None
    names: list[str] = []
    for piece in split_top_level(text):
        expanded = _expand_piece(piece, MAX_HOSTS - len(names))
        if expanded is None:
            return None
        names.extend(expanded)
    return names


def _expand_piece(piece: str, limit: int) -> list[str] | None:
    if "[" not in piece:
        return [piece] if "]" not in piece else None
    if piece.count("[") > 8:
        return None
    before, rest = piece.split("[", 1)
    inside, after = rest.split("]", 1) if "]" in rest else (rest, None)
    if after is None or "[" in inside or "]" in before:
        return None
    tails = _expand_piece(after, limit) if "[" in after or "]" in after else [after]
    if tails is None:
        return None
    numbers = _numbers(inside, limit // max(1, len(tails)))
    if numbers is None:
        return None
    return [f"{before}{number}{tail}" for number in numbers for tail in tails]


def _numbers(inside: str, limit: int) -> list[str] | None:
    found: list[str] = []
    for part in inside.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None or len(part) > 60:
            return None
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low or high - low >= limit - len(found):
            return None
        width = len(match[1])
        found.extend(f"{number:0{width}d}" for number in range(low, high + 1))
    return found
