"""Slurm's switch and block records as switches, blocks and nodes of the topology model."""

from __future__ import annotations

from hpjob.topology.model import Block, Node, Switch, Topology
from hpjob.topology.read.slurm_hostlist import expand_hosts
from hpjob.topology.read.slurm_records import Record

TITLE = "Slurm topology"


class Expander:
    """Expands each distinct list once."""

    def __init__(self) -> None:
        self._known: dict[str, list[str] | None] = {}

    def __call__(self, text: str | None) -> list[str] | None:
        if text is None:
            return None
        if text not in self._known:
            self._known[text] = expand_hosts(text)
        return self._known[text]


def whole_children(record: Record, children: list[str] | None) -> list[str]:
    """The last name of a cut list may be a part of a name."""
    return (children or [])[: -1 if record.cut else None]


def heights(children: dict[str, list[str]]) -> dict[str, int]:
    """Height of every switch above the leaves: 0 without children, else one more than the highest child."""
    found: dict[str, int] = {}
    for start in children:
        stack = [start]
        open_names = {start}
        while stack:
            name = stack[-1]
            waiting = [c for c in children[name] if c in children and c not in found and c not in open_names]
            if waiting:
                stack.append(waiting[0])
                open_names.add(waiting[0])
                continue
            below = [found[c] for c in children[name] if c in found]
            found.setdefault(name, 1 + max(below, default=-1) if below else int(bool(children[name])))
            stack.pop()
    return found


def slurm_topology(by_kind: dict[str, list[Record]], expand: Expander, notes: list[str], *, is_flat: bool) -> Topology:
    """Build the topology from the records of one text."""
    switches = by_kind["switch"]
    children = {record.name: whole_children(record, expand(record.children)) for record in switches}
    levels = heights(children)
    found_switches = tuple(
        Switch(
            name=record.name,
            level=record.level if record.level is not None else levels[record.name],
            nodes=() if children[record.name] else tuple(dict.fromkeys(expand(record.nodes) or ())),
            switches=tuple(children[record.name]),
        )
        for record in switches
    )
    blocks, aggregated = (
        tuple(
            Block(name=record.name, nodes=tuple(expand(record.nodes) or ()))
            for record in by_kind[kind]
            if not record.cut and expand(record.nodes)
        )
        for kind in ("block", "aggregated")
    )
    names: dict[str, None] = {}
    for group in by_kind.values():
        for record in group:
            names.update(dict.fromkeys(expand(record.nodes) or ()))
    sources = {key: TITLE for key, there in (("switches", switches), ("blocks", blocks)) if there}
    return Topology(
        nodes=tuple(Node(name=name) for name in names),
        switches=found_switches if switches else (() if is_flat else None),
        blocks=blocks if by_kind["block"] else None,
        aggregated_blocks=aggregated or None,
        source=TITLE,
        notes=tuple(notes),
        sources=sources,
    )
