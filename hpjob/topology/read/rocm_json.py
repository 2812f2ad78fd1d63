"""``amd-smi topology --json`` and ``rocm-smi --showtopo --json``: the tables of the text form, by pair of GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from hpjob.topology.read.graph import Pair
from hpjob.topology.read.structured import load_json, walk

_DRM_PAIR = re.compile(r"\(Topology\) (Weight|Hops|Link type) between DRM devices ([0-9]{1,4}) and ([0-9]{1,4})", re.I)
_CARD = re.compile(r"card([0-9]{1,4})")
_MARKS = (('"link_type"', '"links"'), ("between DRM devices", '"'), ("(Topology) Numa Node", '"card'))


@dataclass
class Tables:
    """What a text shows of each ordered pair of GPUs."""

    gpus: set[int] = field(default_factory=set)
    types: dict[Pair, str] = field(default_factory=dict)
    weights: dict[Pair, int] = field(default_factory=dict)
    hops: dict[Pair, int] = field(default_factory=dict)
    numa: dict[int, int] = field(default_factory=dict)
    there: set[str] = field(default_factory=set)
    """Tables that the text has: type, weight, hops."""


def looks_like_json(text: str) -> bool:
    """Whether the keys of one of the two forms are there."""
    return "{" in text and any(first in text and second in text for first, second in _MARKS)


def json_tables(text: str) -> Tables | None:
    """Read either form; None when the text holds no JSON."""
    loaded = load_json(text)
    if loaded is None or loaded[0] is None:
        return None
    found = Tables()
    for entry in walk(loaded[0]):
        links = entry.get("links")
        if isinstance(entry.get("gpu"), int) and isinstance(links, list):
            _amd_smi(entry["gpu"], links, found)
        for key, value in entry.items():
            _rocm_smi(str(key), value, found)
    filled = {"type": found.types, "weight": found.weights, "hops": found.hops}
    found.there = {name for name, table in filled.items() if table}
    return found


def _amd_smi(gpu: int, links: list[Any], found: Tables) -> None:
    found.gpus.add(gpu)
    for link in links:
        peer = link.get("gpu") if isinstance(link, dict) else None
        if not isinstance(peer, int) or peer == gpu:
            continue
        _note(found, (gpu, peer), link.get("link_type"), link.get("weight"), link.get("num_hops"))


def _rocm_smi(key: str, value: Any, found: Tables) -> None:
    pair = _DRM_PAIR.fullmatch(key)
    card = _CARD.fullmatch(key)
    if pair:
        a, b = int(pair[2]), int(pair[3])
        kind = pair[1].lower()
        for ends in ((a, b), (b, a)):
            _note(
                found,
                ends,
                value if kind == "link type" else None,
                value if kind == "weight" else None,
                value if kind == "hops" else None,
            )
    elif card and isinstance(value, dict):
        found.gpus.add(int(card[1]))
        node = _number(value.get("(Topology) Numa Node"))
        if node is not None:
            found.numa[int(card[1])] = node


def _note(found: Tables, pair: Pair, word: Any, weight: Any, hops: Any) -> None:
    found.gpus.update(pair)
    if isinstance(word, str) and word not in ("N/A", "SELF"):
        found.types[pair] = word
    for table, value in ((found.weights, weight), (found.hops, hops)):
        number = _number(value)
        if number is not None:
            table[pair] = number


def _number(value: Any) -> int | None:
    text = str(value)
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None
