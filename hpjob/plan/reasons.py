"""Why a layout was chosen: the best alternative on each axis, and what it loses by."""

from __future__ import annotations

from collections.abc import Callable

from hpjob.plan.enumeration import recompute_policies
from hpjob.plan.layout import Layout
from hpjob.plan.legality import unsupported_layout
from hpjob.plan.losses import difference, exceeds_words, island_words, link_words, losses, main_loss
from hpjob.plan.model import RunnerUp
from hpjob.plan.problem import Problem
from hpjob.plan.search import FAR, SAME, Candidate
from hpjob.recipe.model import ParallelSettings

_MAX_RUNNERS_UP = 6

_AXES: tuple[tuple[str, str, Callable[[Layout], object]], ...] = (
    ("tp", "tp_size", lambda layout: layout.tp),
    ("pp", "pp_size", lambda layout: layout.pp),
    ("sp", "sp_size", lambda layout: (layout.sequence_mode or "none", layout.sp)),
    ("ep", "ep_size", lambda layout: layout.ep),
    ("zero", "zero_stage", lambda layout: layout.zero),
    ("microbatch", "microbatch_size", lambda layout: layout.microbatch),
    ("schedule", "pp_style", lambda layout: (layout.style, layout.chunks)),
    ("split", "", lambda layout: layout.relief),
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
    parts += [recompute_words(layout)] if layout.recompute != "none" else []
    parts += [f"last stage {layout.relief} layer{'s' if layout.relief > 1 else ''} shorter"] if layout.relief else []
    parts += [str(layout.sequence_mode)] if layout.sequence_mode else []
    return ", ".join(parts)


def recompute_words(layout: Layout) -> str:
    """Return the policy, such as ``full recompute of every 2nd layer``."""
    if layout.recompute != "full" or layout.every_kth == 1:
        return f"{layout.recompute} recompute"
    return f"full recompute of one layer in {layout.every_kth}"


def explain_choice(
    problem: Problem, best: Candidate, candidates: list[Candidate], limit_gib: float
) -> tuple[tuple[str, ...], tuple[RunnerUp, ...]]:
    """Return the reasons, axis by axis, and the plans that came next or were ruled out."""
    fixed = [
        f"{label} {_shown(label, value(best.layout))}"
        for label, field, value in _AXES
        if _is_fixed(problem.settings, field) and (label != "ep" or problem.shape.num_experts)
    ]
    if best.layout.pp == 1 and problem.settings.pp_style not in ("auto", "1f1b"):
        fixed = [words for words in fixed if not words.startswith("schedule")]
        fixed.append(f"schedule {problem.settings.pp_style} (of no effect: pp 1 is no pipeline)")
    reasons = [f"fixed by the recipe: {', '.join(fixed)}"] if fixed else []
    reasons.append(f"links: {island_words(problem.hardware)}")
    for label, field, value in _AXES:
        if not _is_fixed(problem.settings, field) and (label != "ep" or problem.shape.num_experts):
            reason = _axis_reason(problem, best, candidates, limit_gib, label, value)
            reasons += [reason] if reason else []
    layout = best.layout
    others = [f"{name} {size}" for name, size in (("tp", layout.tp), ("pp", layout.pp), ("sp", layout.sp)) if size > 1]
    shards = "its ranks share the optimizer's states" if layout.zero else "its ranks hold full copies"
    taken = f"what {' x '.join(others)} leaves of {problem.world_size} ranks" if others else "all ranks"
    reasons.append(f"dp {layout.dp}: {taken}; {shards if layout.dp > 1 else 'nothing is shared'}")
    reasons.append(_recompute_reason(problem, best, limit_gib))
    return tuple(reasons), _runners_up(problem, best, candidates, limit_gib)


def _axis_reason(
    problem: Problem,
    best: Candidate,
    candidates: list[Candidate],
    limit_gib: float,
    label: str,
    value: Callable[[Layout], object],
) -> str | None:
    chosen = value(best.layout)
    name = f"{label} {_shown(label, chosen)}"
    others = [candidate for candidate in candidates if value(candidate.layout) != chosen and candidate.supported]
    far = FAR * best.time.step
    fitting = [c for c in others if c.memory_gib <= limit_gib and c.time.step <= far]
    sentences = []
    if fitting:
        rival = min(fitting, key=lambda candidate: candidate.order)
        # The layout that changes nothing else says most about this axis; the best one may change more.
        alone = [c for c in fitting if not difference(best.layout, c.layout, label)]
        by_style: dict[str, Candidate] = {}
        for candidate in sorted(alone, key=lambda candidate: candidate.order):
            by_style.setdefault(candidate.layout.style if label == "schedule" else "", candidate)
        nearest = list(by_style.values()) or [rival]
        sentences += [_against(problem, best, candidate, label, value) for candidate in nearest]
        if rival.time.step < 0.99 * nearest[0].time.step:
            sentences.append(_against(problem, best, rival, label, value))
    faster = [c for c in others if c.memory_gib > limit_gib and c.time.step < best.time.step]
    if faster:
        rival = min(faster, key=lambda candidate: (candidate.memory_gib, candidate.order))
        shown = f"{label} {_shown(label, value(rival.layout))}"
        also = difference(best.layout, rival.layout, label)
        shown += f" (with {also})" if also else ""
        sentences.append(f"{shown} would be faster but needs {exceeds_words(rival.memory_gib, limit_gib)}")
    if not sentences and label in {"tp", "pp"}:
        percent = round(100 * (FAR - 1))
        sentences.append(f"any other value is not legal, does not fit, or is over {percent} % slower")
    island = problem.hardware.island_size
    if label == "tp" and chosen == island and problem.world_size > island:
        sentences.append(f"tp above {island} would leave the island of {island} GPUs")
    if label == "ep" and best.layout.ep * best.layout.tp <= island < problem.hardware.linked_size:
        sentences.append(_exchange_words(problem, best.layout))
    return f"{name}: {'; '.join(sentences)}" if sentences else None


def _exchange_words(problem: Problem, layout: Layout) -> str:
    """Say what experts spread over all GPUs of a node would lose where a pair of them has no link."""
    hardware, tp = problem.hardware, layout.tp
    wide = hardware.linked_size // tp
    whole, own = (link_words(hardware, size, tp, layout.world_size, all_pairs=True) for size in (wide, layout.ep))
    return f"inside a node ep {wide} would move tokens over {whole}" + (
        f", and not over {own}" if layout.ep > 1 else ""
    )


def _against(problem: Problem, best: Candidate, rival: Candidate, label: str, value: Callable[[Layout], object]) -> str:
    """Compare with the best layout that has another value; what else it changes is named."""
    also = difference(best.layout, rival.layout, label)
    with_ = f" (then best with {also})" if also else ""
    return f"{label} {_shown(label, value(rival.layout))}{with_} is {_slower(problem, best, rival)}"


def _slower(problem: Problem, best: Candidate, rival: Candidate) -> str:
    """Say how much slower a layout is and by what, or that the times do not tell them apart."""
    if rival.time.step <= best.time.step:
        return f"as fast within {100 * SAME:g} % and less simple"
    percent = 100 * (rival.time.step / best.time.step - 1)
    return f"{percent:.1f} % slower: {main_loss(problem.hardware, best, rival)}"


def _recompute_reason(problem: Problem, best: Candidate, limit_gib: float) -> str:
    """Say what the next policy on the faster side would need, or what repeating would cost."""
    layout, runtime = best.layout, problem.runtime
    name = f"recompute {recompute_words(layout).replace(' recompute', '', 1)}"
    settings = problem.settings.gradient_checkpoint_config
    policies = recompute_policies(problem)
    if settings.policy != "auto" or settings.num_ckpt_layers_per_stage is not None:
        return f"{name}: fixed by the recipe"
    place = policies.index((layout.recompute, layout.every_kth))
    if place:
        recompute, k = policies[place - 1]
        faster = layout._replace(recompute=recompute, every_kth=k)
        gain = 100 * (1 - runtime.step(faster, simulate=False).step / runtime.step(layout, simulate=False).step)
        words = "no recompute" if recompute == "none" else recompute_words(faster)
        needed = runtime.worst_gib(faster)
        return f"{name}: {words} is {gain:.1f} % faster but needs {exceeds_words(needed, limit_gib)}"
    full = layout._replace(recompute="full", every_kth=1)
    cost = 100 * (runtime.step(full, simulate=False).step / runtime.step(layout, simulate=False).step - 1)
    saved = best.memory_gib - runtime.worst_gib(full)
    return f"{name}: everything fits without; full would save {saved:.1f} GiB and take {cost:.1f} % longer"


def _is_fixed(settings: ParallelSettings, field: str) -> bool:
    return bool(field) and bool(getattr(settings, field) != "auto")


def _shown(label: str, value: object) -> str:
    if label == "split":
        return "even" if not value else f"of {value} fewer in the last stage"
    if isinstance(value, tuple):
        name, number = value
        return f"{name} x{number}" if number > 1 else str(name)
    return str(value)


def _runners_up(
    problem: Problem, best: Candidate, candidates: list[Candidate], limit_gib: float
) -> tuple[RunnerUp, ...]:
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
    return tuple(_runner_up(problem, best, candidate, limit_gib) for candidate in chosen)


def _runner_up(problem: Problem, best: Candidate, rival: Candidate, limit_gib: float) -> RunnerUp:
    percent = 100 * (rival.time.step / best.time.step - 1)
    if rival.memory_gib > limit_gib:
        why = f"needs {exceeds_words(rival.memory_gib, limit_gib)} ({-percent:.1f} % faster otherwise)"
    elif not rival.supported:
        why = f"{-percent:.1f} % faster, but {unsupported_layout(rival.layout)[0]}"
    else:
        why = _slower(problem, best, rival)
    return RunnerUp(
        summary=summary(rival.layout),
        step_s=round(rival.time.step, 4),
        memory_gib=round(rival.memory_gib, 2),
        why_not=why,
        lost_s={kind: round(seconds, 4) + 0.0 for kind, seconds in losses(best, rival).items()},
    )
