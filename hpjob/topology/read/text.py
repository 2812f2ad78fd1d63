"""Text as people paste it, made readable: encodings, terminal codes, control bytes, odd blanks.

Nothing is repaired that carries meaning: a damaged character becomes U+FFFD, so that the word that
holds it is known by no reader and counts as not seen.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate
from typing import Any

_BOMS = (
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\xef\xbb\xbf", "utf-8-sig"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]"  # colours, underline, cursor
    r"|\][^\x07\x1b\n]{0,400}(?:\x07|\x1b\\)"  # window title
    r"|[()][0-9A-B])"  # character set
)
_WRITTEN_OUT = re.compile(r"(?:\^\[|\\e|\\033|\\x1b|\\u001b)\[[0-9;]{0,20}m")
_RESIDUE = re.compile(r"\[[0-9]{0,3}(?:;[0-9]{1,3}){0,4}m(?![a-z])")
"""A colour code that lost its escape byte in a paste."""
_ENTITIES = (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&#39;", "'"), ("&amp;", "&"))
"""What a web page shows for characters of markup."""
_EMPTY_LINES = re.compile(r"\n(?:[ \t]*\n){3,}")
_PRINTABLE = bytes([9, 13, 27, *range(32, 127)])
_LARGE = 1_000_000
"""Bytes from which lines of noise are emptied before anything else looks at them."""
_DELETED = bytes([0x00, 0x0E, 0x0F, 0x7F])
_CONTROL = bytes(0xFF if code < 32 and code not in (9, 10) else code for code in range(256))
"""Maps control bytes to one that is no UTF-8, which decodes to U+FFFD."""
_INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff"
_BLANKS = "\u00a0\u2002\u2003\u2007\u2009\u202f\u3000"
_LINE_ENDS = "\u2028\u2029\x85"
_ODD = re.compile(f"[{_INVISIBLE}{_BLANKS}{_LINE_ENDS}]")
_REPLACED = dict.fromkeys(_INVISIBLE, "") | dict.fromkeys(_BLANKS, " ") | dict.fromkeys(_LINE_ENDS, "\n")
MAX_LINE = 2_000_000
"""Characters; a longer line is no line of any tool that prints tables."""


class Source:
    """A cleaned text and what every reader asks of it, computed once."""

    def __init__(self, text: str) -> None:
        self.text = clean(text)
        self.cache: dict[object, Any] = {}
        """What readers computed for this text and may ask for again."""

    @cached_property
    def lines(self) -> list[str]:
        """Lines without their ends; overlong ones are emptied."""
        return [line if len(line) <= MAX_LINE else "" for line in self.text.split("\n")]

    @cached_property
    def lower(self) -> str:
        """The text in lower case, for quick looks."""
        return self.text.lower()

    def lines_with(self, needle: str, limit: int) -> Iterator[tuple[int, str]]:
        """Lines that hold ``needle`` with the place where each begins, at most ``limit`` of them."""
        at = self.text.find(needle)
        while at >= 0 and limit > 0:
            begin = self.text.rfind("\n", 0, at) + 1
            end = self.text.find("\n", at)
            end = len(self.text) if end < 0 else end
            if end - begin <= MAX_LINE:
                yield begin, self.text[begin:end]
            limit -= 1
            at = self.text.find(needle, end)

    def lines_holding(self, words: Iterable[str]) -> set[int]:
        """Numbers of the lines that hold one of ``words`` (in lower case), found without a look at each line."""
        starts = list(accumulate((len(line) + 1 for line in self.lower.split("\n")), initial=0))
        found: set[int] = set()
        for word in words:
            at = self.lower.find(word)
            while at >= 0:
                number = bisect_right(starts, at) - 1
                found.add(number)
                at = self.lower.find(word, starts[number + 1])
        return found


def decode(data: bytes) -> str:
    """Turn bytes into text: byte order marks, UTF-16 without one, UTF-8, anything else by replacement."""
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return data.decode(encoding, errors="replace")
    sample = data[:4096]
    if len(sample) >= 4 and sample.count(0) * 5 >= len(sample) * 2:
        encoding = "utf-16-le" if sample[1::2].count(0) >= sample[0::2].count(0) else "utf-16-be"
        return data.decode(encoding, errors="replace")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        if len(data) > _LARGE:
            data = b"\n".join(b"" if _is_binary(line) else line for line in data.split(b"\n"))
        return data.decode("utf-8", errors="replace")


def _is_binary(line: bytes) -> bool:
    """More than a quarter is no character that a tool prints: noise, whatever the rest looks like."""
    return len(line.translate(None, _PRINTABLE)) * 4 > len(line)


def clean(text: str) -> str:
    """Return ``text`` without terminal codes, invisible characters, odd line ends and long gaps of empty lines."""
    text = _unwrapped(text)
    for end in ("\r\n", "\r", "\x0b", "\x0c"):
        if end in text:
            text = text.replace(end, "\n")
    if "\x1b" in text:
        text = _ESCAPE.sub("", _ESCAPE.sub("", text))  # one code may stand inside another
    if "[" in text:
        if "^[[" in text or "\\" in text:
            text = _WRITTEN_OUT.sub("", text)
        text = _RESIDUE.sub("", text)
    data = text.encode("utf-8", errors="replace").translate(_CONTROL, _DELETED)
    text = data.decode("utf-8", errors="replace")
    if not text.isascii():
        text = _ODD.sub(lambda match: _REPLACED[match[0]], text)
    return _EMPTY_LINES.sub("\n\n\n", text)


def _unwrapped(text: str) -> str:
    """Undo what holds a listing: a string of JSON or of a log, the markup of a page."""
    if "\\n" in text and text.count("\\n") > text.count("\n"):
        text = text.replace("\\n", "\n").replace("\\t", "\t")
    if "&lt;" in text or "&gt;" in text:
        for mark, character in _ENTITIES:
            text = text.replace(mark, character)
    if "**" in text:
        text = text.replace("**", "")
    return text


def by_number(names: list[str]) -> list[str]:
    """Sort names so that mlx5_2 stands before mlx5_10."""
    return sorted(names, key=natural_key)


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Key that compares runs of digits as numbers."""
    parts = re.split(r"([0-9]+)", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part]


def is_cut_mark(line: str) -> bool:
    """Whether a line only says that something was left out."""
    return line.strip().strip("[]<>() .…").lower() in {"", "snip", "truncated", "omitted", "cut"} and bool(line.strip())
