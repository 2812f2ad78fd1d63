"""Pictures of a plan as SVG: the pipeline's timeline, memory by kind, and where ranks are placed."""

from __future__ import annotations

from html import escape
from pathlib import Path

from hpjob.plan.layout import Layout
from hpjob.plan.model import Plan
from hpjob.plan.problem import Problem
from hpjob.plan.schedule_timeline import Span
from hpjob.report.topology_svg import topology_svg
from hpjob.topology.model import Topology

_WIDTH, _LEFT, _TOP, _ROW, _GAP = 960, 110, 52, 22, 5
_MAX_ROWS = 32
"""Pipeline ranks drawn; further ones are counted in the title."""
_COLOURS = {"F": "#4c78a8", "B": "#f58518", "W": "#54a24b"}
_OPERATIONS = {"F": "forward", "B": "backward", "W": "weight gradients"}
_KINDS = {
    "weights": "#4c78a8",
    "gradients": "#f58518",
    "optimizer": "#54a24b",
    "activations": "#b279a2",
    "logits": "#e45756",
    "workspace": "#9d9d9d",
}


def draw_plan(folder: Path, plan: Plan, problem: Problem, layout: Layout, topology: Topology) -> tuple[Path, ...]:
    """Write ``timeline.svg`` (with a pipeline only), ``memory.svg`` and ``placement.svg``.

    Args:
        folder: Made if it is missing.
        plan: What to draw.
        problem: What the plan solves.
        layout: The layout of the plan.
        topology: The nodes in the plan's order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"memory.svg": memory_svg(plan), "placement.svg": topology_svg(topology, plan)}
    if layout.pp > 1:
        # More microbatches repeat the steady state.
        shown = layout._replace(num_microbatches=min(layout.num_microbatches, 2 * layout.pp))
        model = problem.runtime.time_model(layout)
        texts["timeline.svg"] = timeline_svg(model.timeline(shown), plan, shown.num_microbatches)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return tuple(folder / name for name in sorted(texts))


def timeline_svg(spans: tuple[Span, ...], plan: Plan, num_microbatches: int) -> str:
    """Draw the operations of every pipeline rank; numbers are microbatches, later chunks are paler."""
    pp = plan.degrees.pp
    rows = min(pp, _MAX_ROWS)
    end = max(span.end for span in spans)
    scale = (_WIDTH - _LEFT - 10) / end
    parts = []
    for span in spans:
        if span.rank >= rows:
            continue
        x, width = _LEFT + span.begin * scale, max(0.4, (span.end - span.begin) * scale - 0.4)
        y = _TOP + span.rank * (_ROW + _GAP)
        pale = 0.6 if span.stage >= pp else 1.0
        title = (
            f"{_OPERATIONS[span.kind]}, stage {span.stage}, microbatch {span.microbatch}: {span.end - span.begin:.4g} s"
        )
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW}" fill="{_COLOURS[span.kind]}" '
            f'fill-opacity="{pale}"><title>{title}</title></rect>'
        )
        if width > 14:
            parts.append(f'<text x="{x + 3:.1f}" y="{y + 15}" fill="white" font-size="9">{span.microbatch}</text>')
    parts += [_label(rank, f"pp {rank}") for rank in range(rows)]
    more = f", {pp - rows} further ranks not drawn" if pp > rows else ""
    title = (
        f"{plan.pipeline.style}: {num_microbatches} of {plan.pipeline.num_microbatches} microbatches, {end:.3g} s{more}"
    )
    used = {span.kind for span in spans}
    return _document(title, rows, parts, {_OPERATIONS[kind]: _COLOURS[kind] for kind in _COLOURS if kind in used})


def memory_svg(plan: Plan) -> str:
    """Draw one bar a pipeline rank, by kind, with the line of what a plan may fill."""
    rows = min(len(plan.memory), _MAX_ROWS)
    limit = plan.memory_limit_gib
    scale = (_WIDTH - _LEFT - 70) / max([limit, *(rank.total_gib for rank in plan.memory)])
    parts = []
    for row, rank in enumerate(plan.memory[:rows]):
        x, y = float(_LEFT), _TOP + row * (_ROW + _GAP)
        for kind, colour in _KINDS.items():
            gib = getattr(rank, f"{kind}_gib")
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{gib * scale:.1f}" height="{_ROW}" fill="{colour}">'
                f"<title>{kind} {gib:.1f} GiB</title></rect>"
            )
            x += gib * scale
        parts.append(f'<text x="{x + 4:.1f}" y="{y + 15}" fill="#333">{rank.total_gib:.1f}</text>')
        parts.append(_label(row, f"pp {rank.pp_rank}"))
    at = _LEFT + limit * scale
    bottom = _TOP + rows * (_ROW + _GAP)
    parts.append(
        f'<line x1="{at:.1f}" y1="{_TOP - 6}" x2="{at:.1f}" y2="{bottom}" stroke="#c00" stroke-dasharray="4 3"/>'
    )
    more = f", {len(plan.memory) - rows} further ranks not drawn" if len(plan.memory) > rows else ""
    return _document(f"memory per GPU in GiB; the line is the usable {limit:.1f}{more}", rows, parts, _KINDS)


def _label(row: int, text: str) -> str:
    return f'<text x="{_LEFT - 8}" y="{_TOP + row * (_ROW + _GAP) + 15}" text-anchor="end" fill="#333">{text}</text>'


def _document(title: str, rows: int, parts: list[str], legend: dict[str, str]) -> str:
    height = _TOP + rows * (_ROW + _GAP) + 10
    x, keys = float(_LEFT), []
    for name, colour in legend.items():
        keys.append(f'<rect x="{x:.0f}" y="28" width="10" height="10" fill="{colour}"/>')
        keys.append(f'<text x="{x + 14:.0f}" y="37" fill="#333">{name}</text>')
        x += 30 + 7 * len(name)
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="11">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="10" y="18" font-size="13">{escape(title)}</text>',
            *keys,
            *parts,
            "</svg>",
            "",
        )
    )
