"""XML read into plain elements: expat without entities, and a tolerant scan for damaged text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal
from xml.parsers import expat

MAX_ELEMENTS = 500_000
MAX_DEPTH = 128
_DECLARATION = re.compile(r"<\?xml[^>]{0,200}\?>|<!DOCTYPE[^>\[]{0,500}>", re.I)
_TAG = re.compile(
    r"<!--.*?(?:-->|\Z)|<(/?)([A-Za-z_][\w.-]{0,40})((?:\s+[\w:.-]{1,40}\s*=\s*(?:\"[^\"<]{0,2000}\"|'[^'<]{0,2000}'))*)\s*(/?)>",
    re.S,
)
_ATTRIBUTE = re.compile(r"([\w:.-]{1,40})\s*=\s*(?:\"([^\"<]*)\"|'([^'<]*)')")


@dataclass
class Element:
    """One element with its attributes and children."""

    tag: str
    attributes: dict[str, str]
    parent: Element | None = None
    children: list[Element] = field(default_factory=list)

    def get(self, name: str, default: str = "") -> str:
        """Return an attribute."""
        return self.attributes.get(name, default)

    def ancestors(self) -> Iterator[Element]:
        """Elements around this one, the nearest first."""
        at = self.parent
        while at is not None:
            yield at
            at = at.parent

    def walk(self) -> Iterator[Element]:
        """This element and all below it in the order of the text."""
        stack = [self]
        while stack:
            at = stack.pop()
            yield at
            stack.extend(reversed(at.children))


@dataclass
class _Builder:
    root: Element = field(default_factory=lambda: Element("", {}))
    count: int = 0
    damaged: bool = False

    def __post_init__(self) -> None:
        self.stack = [self.root]

    def open(self, tag: str, attributes: dict[str, str]) -> None:
        self.count += 1
        if self.count > MAX_ELEMENTS or len(self.stack) > MAX_DEPTH:
            raise _TooLargeError
        element = Element(tag, attributes, self.stack[-1])
        self.stack[-1].children.append(element)
        self.stack.append(element)

    def close(self, tag: str) -> None:
        if len(self.stack) > 1 and self.stack[-1].tag == tag:
            self.stack.pop()
            return
        self.damaged = True
        for depth in range(len(self.stack) - 1, 0, -1):
            if self.stack[depth].tag == tag:
                del self.stack[depth:]
                return


class _TooLargeError(Exception):
    """More elements, or deeper ones, than any topology has; or an entity declaration."""


Wholeness = Literal["whole", "cut", "damaged"]


def parse_elements(text: str) -> tuple[Element, Wholeness]:
    """Return a nameless root above all top elements, and how whole the text was.

    ``cut`` = everything nests, but the end is missing; ``damaged`` = what belongs to what cannot be told.

    Entity declarations are never expanded: such a text goes to the tolerant scan, which knows none.
    """
    start = text.find("<")
    body = _DECLARATION.sub("", text[max(start, 0) :], count=2)
    end = body.rfind(">")
    builder = _Builder()
    parser = expat.ParserCreate()
    parser.StartElementHandler = lambda tag, attributes: None if tag == "_" else builder.open(tag, attributes)
    parser.EndElementHandler = lambda tag: None if tag == "_" else builder.close(tag)
    parser.EntityDeclHandler = _refuse
    try:
        parser.Parse("<_>" + body[: end + 1] + "</_>", True)
        return builder.root, "whole"
    except (expat.ExpatError, _TooLargeError, ValueError):
        return _scan(body)


def _refuse(*_: object) -> None:
    raise _TooLargeError


def _scan(text: str) -> tuple[Element, Wholeness]:
    builder = _Builder()
    gap = 0
    try:
        for match in _TAG.finditer(text):
            builder.damaged |= "<" in text[gap : match.start()]
            gap = match.end()
            closing, tag, attributes, empty = match.groups()
            if tag is None:
                continue
            if closing:
                builder.close(tag)
                continue
            builder.open(tag, {m[1]: m[2] if m[2] is not None else m[3] for m in _ATTRIBUTE.finditer(attributes or "")})
            if empty:
                builder.close(tag)
    except _TooLargeError:
        builder.damaged = True
    return builder.root, "damaged" if builder.damaged else "cut"
