"""Why a layout was chosen: the best alternative on each axis, and what it loses by."""

from __future__ import annotations

from collections.abc import Callable

from hpjob.plan.layout import Layout
from hpjob.plan.legality import unsupported_layout
from hpjob.plan.model import RunnerUp
from hpjob.plan.problem import Problem
from hpjob.plan.search import Candidate
from hpjob.recipe.model import ParallelSettings

_MAX_RUNNERS_UP = 6

_AXES: tuple[tuple[str, str, Callable[[Layout], object]], ...] = (
    ("tp", "tp_size", lambda layout: layout.tp),
    ("pp", "pp_size", lambda layout: layout.pp),
    ("zero", "zero_stage", lambda layout: layout.zero),
    ("microbatch", "microbatch_size", lambda layout: layout.microbatch),
    ("recompute", "gradient_checkpoint_config", lambda layout: layout.recompute),
    ("schedule", "pp_style", lambda layout: (layout.style, layout.chunks)),
)


def summary(layout: Layout) -> str:
    """Return one line such as ``tp 8 · pp 2 · dp 2, zero 1, 1f1b, 16 x 1``."""
    axes = [f"tp {layout.tp}", f"pp {layout.pp}", f"dp {layout.dp}"]
    axes += [f"sp {layout.sp}"] if layout.sp > 1 else []
    axes += [f"ep {layout.ep}"] if layout.ep > 1 else []
    parts = [" · ".join(axes), f"zero {layout.zero}"]
    if layout.pp > 1:
        parts.append(layout.style + (f" x{layout.chunks}" if layout.chunks > 1 else ""))
    parts.append(f"{layout.num_microbatches} x {layout.microbatch}")
    parts += [f"{layout.recompute} recompute"] if layout.recompute != "none" else []
    parts += [str(layout.sequence_mode)] if layout.sequence_mode else []
    return ", ".join(parts)


def explain_choice(
    problem: Problem, best: Candidate, candidates: list[Candidate], limit_gib: float
) -> tuple[tuple[str, ...], tuple[RunnerUp, ...]]:
    """Return one reason an axis, and the plans that came next or were ruled out."""
    free = [axis for axis in _AXES if not _is_fixed(problem.settings, axis[1])]
    fixed = [
        f"{label} {_shown(value(best.layout))}" for label, field, value in _AXES if (label, field, value) not in free
    ]
    reasons = [f"fixed by the recipe: {', '.join(fixed)}"] if fixed else []
    for label, _, value in free:
        reason = _axis_reason(problem, best, candidates, limit_gib, label, value)
        reasons += [reason] if reason else []
    return tuple(reasons), _runners_up(best, candidates, limit_gib)


def _axis_reason(
    problem: Problem,
    best: Candidate,
    candidates: list[Candidate],
    limit_gib: float,
    label: str,
    value: Callable[[Layout], object],
) -> str | None:
    chosen = value(best.layout)
    name = f"{label} {_shown(chosen)}"
    others = [candidate for candidate in candidates if value(candidate.layout) != chosen and candidate.supported]
    if not others:
        return f"{name}: no other value is legal and supported" if label in {"tp", "pp"} else None
    fitting = [candidate for candidate in others if candidate.memory_gib <= limit_gib]
    sentences = []
    if fitting:
        rival = min(fitting, key=lambda candidate: candidate.order)
        percent = 100 * (rival.time.step / best.time.step - 1)
        sentences.append(f"{label} {_shown(value(rival.layout))} is {percent:.1f} % slower ({_main_loss(best, rival)})")
    faster = [c for c in others if c.memory_gib > limit_gib and c.time.step < best.time.step]
    if faster:
        rival = min(faster, key=lambda candidate: (candidate.memory_gib, candidate.order))
        needed = f"{rival.memory_gib:.1f} of {limit_gib:.1f} GiB"
        sentences.append(f"{label} {_shown(value(rival.layout))} would be faster but needs {needed}")
    island = problem.hardware.island_size
    if label == "tp" and chosen == island and problem.world_size > island:
        sentences.append(f"tp above {island} would leave the island of {island} GPUs")
    return f"{name}: {'; '.join(sentences)}" if sentences else None


def _is_fixed(settings: ParallelSettings, field: str) -> bool:
    if field == "gradient_checkpoint_config":
        return settings.gradient_checkpoint_config.policy != "auto"
    return bool(getattr(settings, field) != "auto")


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        style, chunks = value
        return f"{style} x{chunks}" if chunks > 1 else str(style)
    return str(value)


def _main_loss(best: Candidate, rival: Candidate) -> str:
    """Name the kind of time in which the rival loses most."""
    kinds = ("compute", "bubble", "tp_comm", "pp_comm", "dp_comm", "optimizer")
    losses = {kind: getattr(rival.time, kind) - getattr(best.time, kind) for kind in kinds}
    kind = max(kinds, key=lambda name: losses[name])
    words = kind.replace("_comm", " traffic")
    return f"{losses[kind]:+.3g} s {words}"


def _runners_up(best: Candidate, candidates: list[Candidate], limit_gib: float) -> tuple[RunnerUp, ...]:
    """The best of every other (tp, pp, sp), and faster plans that memory or the runtime rules out."""
    found: dict[tuple[int, int, int, str], Candidate] = {}
    own = (best.layout.tp, best.layout.pp, best.layout.sp)
    for candidate in sorted(candidates, key=lambda candidate: candidate.order):
        fits = candidate.memory_gib <= limit_gib
        faster = candidate.time.step < best.time.step
        kind = "slower" if fits and candidate.supported else "memory" if not fits else "runtime"
        sizes = (candidate.layout.tp, candidate.layout.pp, candidate.layout.sp)
        if (kind == "slower" and sizes != own) or (kind == "runtime" and faster):
            found.setdefault((*sizes, kind), candidate)
        elif kind == "memory" and faster:
            # The one that misses by least says most about what more memory would bring.
            least = found.get((*sizes, kind))
            if least is None or candidate.memory_gib < least.memory_gib:
                found[(*sizes, kind)] = candidate
    by_kind: dict[str, list[Candidate]] = {"slower": [], "memory": [], "runtime": []}
    for (*_, kind), candidate in found.items():
        by_kind[kind].append(candidate)
    by_kind["memory"].sort(key=lambda candidate: (candidate.memory_gib, candidate.order))
    share = _MAX_RUNNERS_UP // 3
    chosen = by_kind["runtime"][:share] + by_kind["memory"][:share]
    chosen += by_kind["slower"][: _MAX_RUNNERS_UP - len(chosen)]
    return tuple(_runner_up(best, candidate, limit_gib) for candidate in chosen)


def _runner_up(best: Candidate, rival: Candidate, limit_gib: float) -> RunnerUp:
    percent = 100 * (rival.time.step / best.time.step - 1)
    if rival.memory_gib > limit_gib:
        why = f"needs {rival.memory_gib:.1f} GiB a GPU, {limit_gib:.1f} are usable ({-percent:.1f} % faster otherwise)"
    elif not rival.supported:
        why = f"{-percent:.1f} % faster, but {unsupported_layout(rival.layout)[0]}"
    else:
        why = f"{percent:.1f} % slower: {_main_loss(best, rival)}"
    return RunnerUp(
        summary=summary(rival.layout),
        step_s=round(rival.time.step, 4),
        memory_gib=round(rival.memory_gib, 2),
        why_not=why,
    )
