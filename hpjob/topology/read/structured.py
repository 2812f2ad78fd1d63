"""JSON and YAML as people paste it: elided, cut, with a comma too many."""

from __future__ import annotations

import json
import re
from collections import deque
from typing import Any

import yaml

_TOKEN = re.compile(r"[{}\[\]:]|\"(?:[^\"\\\n]|\\.){0,5000}\"|-?[0-9]+(?:\.[0-9]+)?|[A-Za-z_][A-Za-z0-9_]*|\.\.\.|…")
_WORDS = {"true": True, "false": False, "null": None}
_ELISION = re.compile(r"^[ \t,]*(?://|#)?[ \t]*(?:\.\.\.|…)", re.M)
MAX_TOLERANT = 8_000_000
MAX_YAML = 2_000_000
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_json(text: str) -> tuple[Any, bool] | None:
    """Return the first JSON value and whether it is whole; None when there is none."""
    starts = [match.start() for match in re.finditer(r"[{\[](?=\s*[\"{\[\]}])", text[:200_000])][:20]
    for start in starts:
        try:
            document, _ = json.JSONDecoder().raw_decode(text, start)
        except (json.JSONDecodeError, RecursionError):
            continue
        if isinstance(document, (dict, list)) and document and start == starts[0]:
            return document, not _ELISION.search(text)
    if not starts or len(text) - starts[0] > MAX_TOLERANT:
        return None
    return _tolerant(text[starts[0] :])


def _tolerant(text: str) -> tuple[Any, bool]:
    """Read tokens and ignore commas; what is still open at the end was cut."""
    root: list[Any] = []
    stack: list[Any] = [root]
    keys: list[str | None] = [None]
    previous: Any = None
    whole = True
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in ("...", "…"):
            whole = False
        elif token in "{[":
            value: Any = {} if token == "{" else []
            _put(stack, keys, value)
            stack.append(value)
            keys.append(None)
            if len(stack) > 200:
                return root, False
        elif token in "}]":
            if len(stack) > 1:
                stack.pop()
                keys.pop()
            if len(stack) == 1:
                break
        elif token == ":":
            keys[-1] = previous if isinstance(previous, str) else None
        else:
            previous = _scalar(token)
            if not (isinstance(stack[-1], dict) and keys[-1] is None):
                _put(stack, keys, previous)
    return (root[0] if root else None), whole and len(stack) == 1


def _scalar(token: str) -> Any:
    if token.startswith('"'):
        try:
            return json.loads(token)
        except json.JSONDecodeError:
            return token.strip('"')
    if token[0].isdigit() or token[0] == "-":
        return float(token) if "." in token else int(token[:18])
    return _WORDS.get(token, token)


def _put(stack: list[Any], keys: list[str | None], value: Any) -> None:
    if isinstance(stack[-1], list):
        stack[-1].append(value)
    elif keys[-1] is not None:
        stack[-1][keys[-1]] = value
        keys[-1] = None


def load_yaml(text: str) -> Any:
    """Return the documents of a YAML text, or None; anchors are refused, since they can expand without end."""
    if len(text) > MAX_YAML or ("&" in text and re.search(r"[:-]\s+&\w", text)):
        return None
    try:
        return list(yaml.load_all(text, Loader=_Loader))
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


def walk(document: Any, limit: int = 500_000) -> list[dict[str, Any]]:
    """All mappings of a document, outer ones first."""
    found: list[dict[str, Any]] = []
    waiting: deque[Any] = deque([document])
    while waiting and limit > 0:
        at = waiting.popleft()
        limit -= 1
        if isinstance(at, dict):
            found.append(at)
            waiting.extend(value for value in at.values() if isinstance(value, (dict, list)))
        elif isinstance(at, list):
            waiting.extend(value for value in at if isinstance(value, (dict, list)))
    return found
