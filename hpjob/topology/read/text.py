"""Text as people paste it, made readable: encodings, terminal codes, control bytes, odd blanks.

Nothing is repaired that carries meaning: a damaged character becomes U+FFFD, so that the word that
holds it is known by no reader and counts as not seen.
"""

from __future__ import annotations

import re
from functools import cached_property

_BOMS = (
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\xef\xbb\xbf", "utf-8-sig"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_TERMINAL_CODE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, underline, cursor
    r"|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)"  # window title
    r"|\x1b[()][0-9A-B]"  # character set
    r"|(?:\^\[|\\e|\\033|\\x1b|\\u001b)\[[0-9;]*m"  # written out by a logger
    r"|\[[0-9]{0,3}(?:;[0-9]{1,3}){0,4}m(?![a-z])"  # the escape byte was lost in a paste
)
_DROPPED = dict.fromkeys(map(ord, "\x00\x0e\x0f\x7f\u200b\u200c\u200d\u2060\ufeff"))
_BLANKS = dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2007\u2009\u202f\u3000"), " ")
_NEWLINES = dict.fromkeys(map(ord, "\x0b\x0c\u2028\u2029\x85"), "\n")
_CONTROL = {code: "\ufffd" for code in range(32) if chr(code) not in "\t\n"} | {
    code: "\ufffd" for code in range(0x80, 0xA0)
}
_TRANSLATION = {**_CONTROL, **_DROPPED, **_BLANKS, **_NEWLINES}

MAX_LINE = 2_000_000
"""Characters; a longer line is no line of any tool that prints tables."""


class Source:
    """A cleaned text and what every reader asks of it, computed once."""

    def __init__(self, text: str) -> None:
        self.text = clean(text)

    @cached_property
    def lines(self) -> list[str]:
        """Lines without their ends; overlong ones are emptied."""
        return [line if len(line) <= MAX_LINE else "" for line in self.text.split("\n")]

    @cached_property
    def head(self) -> str:
        """The beginning, where the tools name themselves."""
        return self.text[:20_000]


def decode(data: bytes) -> str:
    """Turn bytes into text: byte order marks, UTF-16 without one, UTF-8, anything else by replacement."""
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return data.decode(encoding, errors="replace")
    sample = data[:4096]
    if len(sample) >= 4 and sample.count(0) * 5 >= len(sample) * 2:
        encoding = "utf-16-le" if sample[1::2].count(0) >= sample[0::2].count(0) else "utf-16-be"
        return data.decode(encoding, errors="replace")
    return data.decode("utf-8", errors="replace")


def clean(text: str) -> str:
    """Return ``text`` with ``\\n`` line ends and without terminal codes or invisible characters."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "\x1b" in text or "[" in text:
        text = _TERMINAL_CODE.sub("", text)
    return text if text.isascii() and text.isprintable() else text.translate(_TRANSLATION)


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
