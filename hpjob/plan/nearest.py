"""Legal layouts near one that is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log2

from hpjob.plan.enumeration import legal_bases
from hpjob.plan.layout import Layout
from hpjob.plan.problem import Problem
from hpjob.recipe.model import ParallelSettings

_DEGREES = {"tp_size": "tp", "pp_size": "pp", "sp_size": "sp", "ep_size": "ep"}
_COUNTS = {"num_model_chunks": "chunks", "microbatch_size": "microbatch", "num_microbatches": "num_microbatches"}
_CHOICES = {"pp_style": "style", "sequence_parallelism_mode": "sequence_mode"}
LAYOUT_FIELDS = (*_DEGREES, *_COUNTS, *_CHOICES)
"""Settings that say what the layout is."""
SHARDING_FIELDS = ("zero_shard_size", "cpu_offload")
"""Settings that bind ZeRO, where they are set."""


def nearest_layouts(problem: Problem) -> list[str]:
    """Return up to three legal layouts near the fixed values, in words: those that change one of them come first."""
    s = problem.settings
    fixed = [name for name in LAYOUT_FIELDS if getattr(s, name) != "auto"]
    best: dict[str, float] = {}
    for layout in _relaxed(problem, fixed):
        words = _in_words(layout, s)
        distance = _distance(layout, s, fixed)
        best[words] = min(best.get(words, distance), distance)
    return sorted(best, key=lambda words: (best[words], len(words), words))[:3]


def _relaxed(problem: Problem, fixed: list[str]) -> Iterator[Layout]:
    """Yield legal layouts with one of the fixed values given up, or all of them where that helps nothing."""
    batches = tuple(_COUNTS)[1:]
    any_found = False
    for name in fixed:
        # A batch is split anew with any other number of data-parallel ranks.
        for layout in legal_bases(_without(problem, (name, *batches))):
            any_found = True
            yield layout
    if _binds_zero(problem.settings):
        for layout in legal_bases(_with_any_zero(problem)):
            any_found = True
            yield layout
    if not any_found:
        yield from legal_bases(_with_any_zero(_without(problem, LAYOUT_FIELDS)))


def _binds_zero(s: ParallelSettings) -> bool:
    return any(getattr(s, name) not in (None, False, "auto") for name in SHARDING_FIELDS)


def _with_any_zero(problem: Problem) -> Problem:
    free: dict[str, object] = {"zero_stage": "auto", "zero_shard_size": None, "cpu_offload": False}
    return replace(problem, settings=problem.settings.model_copy(update=free))


def _without(problem: Problem, names: tuple[str, ...]) -> Problem:
    free: dict[str, object] = dict.fromkeys(names, "auto")
    if "sequence_parallelism_mode" in names and problem.settings.enable_sequence_parallelism is not False:
        free["enable_sequence_parallelism"] = "auto"
    return replace(problem, settings=problem.settings.model_copy(update=free))


def _distance(layout: Layout, s: ParallelSettings, fixed: list[str]) -> float:
    """How far a layout is from the fixed values: doublings of degrees, less for other choices."""
    total = 0.0
    for name in fixed:
        wanted = getattr(s, name)
        if name in _DEGREES:
            total += abs(log2(getattr(layout, _DEGREES[name]) / wanted))
        elif name in _COUNTS:
            total += 0.5 * abs(log2(getattr(layout, _COUNTS[name]) / wanted))
        elif getattr(layout, _CHOICES[name]) != wanted:
            total += 0.75
    return total


def _in_words(layout: Layout, s: ParallelSettings) -> str:
    degrees = ["tp", "pp", "dp", *(name for name in ("sp", "ep") if getattr(layout, name) > 1)]
    words = [" · ".join(f"{name} {getattr(layout, name)}" for name in degrees)]
    if _binds_zero(s):
        words.append(f"zero {layout.zero}" + (" offloaded" if layout.cpu_offload else ""))
    if layout.sequence_mode is not None:
        words.append(layout.sequence_mode)
    if layout.style != "1f1b":
        words.append(f"{layout.style} with {layout.chunks} chunks")
    if s.microbatch_size != "auto" or s.num_microbatches != "auto":
        words.append(f"{layout.num_microbatches} microbatches of {layout.microbatch}")
    return ", ".join(words)
