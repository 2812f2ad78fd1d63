"""Prices all legal layouts and simulates the most promising ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpjob.plan.enumeration import legal_layouts
from hpjob.plan.layout import Layout
from hpjob.plan.legality import unsupported_layout
from hpjob.plan.memory import worst_total_gib
from hpjob.plan.problem import Problem
from hpjob.plan.step_time import StepTime

_HOPELESS = 1.3
"""Times the usable memory: layouts above it are no neighbours of a plan that fits."""
_FINALISTS = 16
_MAX_SIMULATED_STAGES = 64


@dataclass(frozen=True, slots=True)
class Candidate:
    """A legal layout with its prices."""

    layout: Layout
    memory_gib: float
    time: StepTime
    num_unsupported: int
    """Things the runtime cannot execute."""

    @property
    def supported(self) -> bool:
        return self.num_unsupported == 0

    @property
    def order(self) -> tuple[float, int, int, int, int, int, int, str, str]:
        """Faster first; of equals the simpler one, so that the choice never depends on chance."""
        a = self.layout
        return (
            round(self.time.step, 9),
            a.pp,
            a.tp,
            a.sp,
            a.chunks,
            a.zero,
            a.num_microbatches,
            str(a.sequence_mode),
            a.recompute,
        )


@dataclass(frozen=True)
class Survey:
    """All legal layouts that are worth comparing."""

    candidates: list[Candidate]
    any_legal: bool
    least: Candidate | None
    """The one that needs least memory, when none fits."""


def survey(problem: Problem, limit_gib: float) -> Survey:
    """Price all legal layouts; those far above the limit only count for the smallest shortfall."""
    candidates: list[Candidate] = []
    hopeless = _HOPELESS * limit_gib
    any_fits, layouts = False, []
    # Microbatch sizes come in ascending order, and a larger one never needs less memory.
    too_large: set[Layout] = set()
    for layout in legal_layouts(problem):
        layouts.append(layout)
        kind = layout._replace(microbatch=0, num_microbatches=0)
        if kind in too_large:
            continue
        memory = worst_total_gib(problem.shape, layout, is_cpu=problem.hardware.is_cpu, enough_gib=hopeless)
        if memory <= hopeless:
            candidates.append(_priced(problem, layout, memory))
            any_fits = any_fits or memory <= limit_gib
        else:
            too_large.add(kind)
    least = None if any_fits or not layouts else _least(problem, layouts)
    return Survey(_refined(problem, candidates, limit_gib), bool(layouts), least)


def _least(problem: Problem, layouts: list[Layout]) -> Candidate:
    """The layout that needs least memory; ties go to the first one."""
    totals = [worst_total_gib(problem.shape, layout, is_cpu=problem.hardware.is_cpu) for layout in layouts]
    index = min(range(len(layouts)), key=totals.__getitem__)
    return _priced(problem, layouts[index], totals[index])


def _priced(problem: Problem, layout: Layout, memory_gib: float) -> Candidate:
    return Candidate(
        layout=layout,
        memory_gib=memory_gib,
        time=problem.model.step(layout, simulate=False),
        num_unsupported=len(unsupported_layout(layout)),
    )


def _refined(problem: Problem, candidates: list[Candidate], limit_gib: float) -> list[Candidate]:
    """Simulate the schedules of the most promising candidates, whichever reason they are compared for."""
    order = sorted(range(len(candidates)), key=lambda index: candidates[index].order)
    fitting = [index for index in order if candidates[index].memory_gib <= limit_gib]
    runnable = [index for index in fitting if candidates[index].supported]
    finalists = {*runnable[:_FINALISTS], *fitting[: _FINALISTS // 2], *order[: _FINALISTS // 2]}
    for index in sorted(finalists):
        old = candidates[index]
        if old.layout.pp > 1 and old.layout.pp * old.layout.chunks <= _MAX_SIMULATED_STAGES:
            candidates[index] = replace(old, time=problem.model.step(old.layout))
    return candidates
