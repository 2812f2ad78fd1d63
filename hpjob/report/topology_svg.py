"""A topology as an SVG: leaf switches, nodes, NVLink islands, and the placement coloured by a parallel group."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from hpjob.topology.model import Node, Topology

if TYPE_CHECKING:
    from hpjob.plan.model import Plan

MAX_DRAWN = 256
"""Nodes drawn; further ones are counted in the title."""
_CELL, _GAP, _PAD, _TITLE = 22, 4, 10, 16
_NODES_PER_ROW = 8
_PLAIN = "#d9d9d9"


@dataclass(frozen=True)
class _Box:
    """One node's place in the picture."""

    svg: str
    width: int
    height: int


def topology_svg(topology: Topology, plan: Plan | None = None, *, group_by: str = "pp") -> str:
    """Draw nodes in frames of their leaf (or block), GPUs in frames of their island.

    Args:
        topology: What to draw; with a plan, the ordered one that the plan was made for.
        plan: Colours each GPU by its rank's group and prints the rank.
        group_by: Axis (tp, pp or dp) whose groups are coloured: GPUs of one tensor-parallel or data-parallel
            group, or of one pipeline stage, have one colour.
    """
    labels = _rank_labels(topology, plan, group_by) if plan is not None else {}
    groups = _groups(topology)
    shown = 0
    y = 2 * _PAD + _TITLE
    parts: list[str] = []
    width = 320
    for title, nodes in groups:
        boxes = [_node(node, labels) for node in nodes[: max(0, MAX_DRAWN - shown)]]
        shown += len(boxes)
        if boxes:
            drawn, frame_width, frame_height = _frame(title, boxes, y)
            parts.append(drawn)
            y += frame_height + _PAD
            width = max(width, frame_width + 2 * _PAD)
    total = len(topology.nodes)
    more = f", {total - shown} more not drawn" if shown < total else ""
    colour = f"; colour = {group_by} {'stage' if group_by == 'pp' else 'group'}" if plan is not None else ""
    head = f"{total} nodes, {topology.source}{colour}{more}"
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" viewBox="0 0 {width} {y}" '
            'font-family="sans-serif" font-size="10">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="{_PAD}" y="{_PAD + 10}" font-size="12">{escape(head)}</text>',
            *parts,
            "</svg>",
            "",
        )
    )


def _groups(topology: Topology) -> list[tuple[str, list[Node]]]:
    """Nodes by leaf, else by block, in the order of the topology."""
    of_node: dict[str, str] = {}
    for switch in topology.switches or ():
        if switch.level == 0:
            of_node.update(dict.fromkeys(switch.nodes, f"leaf {switch.name}"))
    if not of_node:
        for block in topology.blocks or ():
            of_node.update(dict.fromkeys(block.nodes, f"block {block.name}"))
    found: dict[str, list[Node]] = {}
    for node in topology.nodes:
        found.setdefault(of_node.get(node.name, ""), []).append(node)
    return list(found.items())


def _rank_labels(topology: Topology, plan: Plan, group_by: str) -> dict[tuple[str, int], tuple[int, str]]:
    """(node, GPU) -> (rank, colour)."""
    found: dict[tuple[str, int], tuple[int, str]] = {}
    names = [node.name for node in topology.nodes]
    degrees = plan.degrees
    for place in plan.placement:
        at = degrees.coordinates(place.rank)
        coordinates = {axis.value: index for axis, index in at.items()}
        if group_by == "pp":
            index, count = coordinates["pp"], degrees.pp
        else:
            # A group of an axis is named by the coordinates on all others.
            others = [axis for axis in ("pp", "dp", "sp", "tp") if axis != group_by]
            sizes = {"pp": degrees.pp, "dp": degrees.dp, "sp": degrees.sp, "tp": degrees.tp}
            index, count = 0, 1
            for axis in others:
                index = index * sizes[axis] + coordinates[axis]
                count *= sizes[axis]
        if place.node < len(names):
            found[names[place.node], place.gpu] = (place.rank, _colour(index, count))
    return found


def _colour(index: int, count: int) -> str:
    """Hues spread over the circle; neighbours differ in lightness too."""
    return f"hsl({index * 360 // max(1, count)}, 65%, {78 - 16 * (index % 2)}%)"


def _node(node: Node, labels: dict[tuple[str, int], tuple[int, str]]) -> _Box:
    columns = min(8, max(1, len(node.gpus)))
    rows = -(-len(node.gpus) // columns) if node.gpus else 0
    width = max(columns * (_CELL + _GAP) + _GAP, 8 + 6 * len(node.name))
    height = _TITLE + rows * (_CELL + _GAP) + _GAP
    parts = [
        f'<rect width="{width}" height="{height}" fill="none" stroke="#555" rx="3"/>',
        f'<text x="4" y="12">{escape(node.name)}</text>',
    ]
    place: dict[int, tuple[int, int]] = {}
    for at, gpu in enumerate(node.gpus):
        x, y = _GAP + (at % columns) * (_CELL + _GAP), _TITLE + (at // columns) * (_CELL + _GAP)
        place[gpu.index] = (x, y)
        rank, colour = labels.get((node.name, gpu.index), (None, _PLAIN))
        text = str(gpu.index if rank is None else rank)
        broken = ' stroke-dasharray="3 2"' if gpu.mig or gpu.display else ""
        parts.append(f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" fill="{colour}" stroke="#888"{broken}/>')
        parts.append(f'<text x="{x + _CELL // 2}" y="{y + 15}" text-anchor="middle">{text}</text>')
    for island in node.islands or ():
        parts.append(_island_line([place[gpu] for gpu in island.gpus if gpu in place], island.all_to_all))
    return _Box("\n".join(parts), width, height)


def _island_line(places: list[tuple[int, int]], all_to_all: bool | None) -> str:
    """A line under the GPUs of one island: solid when all pairs are linked, else dashed."""
    if len(places) < 2:
        return ""
    points = " ".join(f"{x + _CELL // 2},{y + _CELL + 2}" for x, y in places)
    dash = "" if all_to_all else ' stroke-dasharray="4 3"'
    return f'<polyline points="{points}" fill="none" stroke="#2a7f2a" stroke-width="2"{dash}/>'


def _frame(title: str, boxes: list[_Box], top: int) -> tuple[str, int, int]:
    """Put nodes in rows inside the frame of their leaf."""
    parts: list[str] = []
    x, y, row_height, widest = _PAD, _TITLE + _PAD, 0, 0
    for at, box in enumerate(boxes):
        if at and at % _NODES_PER_ROW == 0:
            x, y, row_height = _PAD, y + row_height + _PAD, 0
        parts.append(f'<g transform="translate({x},{y})">\n{box.svg}\n</g>')
        x += box.width + _PAD
        row_height = max(row_height, box.height)
        widest = max(widest, x)
    height = y + row_height + _PAD
    name = escape(title) if title else "switch not known"
    head = (
        f'<rect width="{widest}" height="{height}" fill="#fafafa" stroke="#aaa"/><text x="{_PAD}" y="14">{name}</text>'
    )
    body = "\n".join(parts)
    return f'<g transform="translate({_PAD},{top})">\n{head}\n{body}\n</g>', widest, height
