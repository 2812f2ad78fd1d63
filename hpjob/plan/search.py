"""Prices all legal layouts and simulates the most promising ones."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hpjob.plan.enumeration import legal_bases, recompute_policies, zero_stages
from hpjob.plan.layout import Layout
from hpjob.plan.legality import unsupported_layout
from hpjob.plan.memory import GIB
from hpjob.plan.problem import Problem
from hpjob.plan.step_time import StepTime
from hpjob.recipe.model import RecomputePolicy

_HOPELESS = 1.3
"""Times the usable memory: layouts above it are no neighbours of a plan that fits."""
FAR = 1.25
"""Times the best step: slower layouts are no neighbours of it."""
SAME = 0.001
"""Part of a step by which predicted times have to differ before the difference decides."""
_CLOSE = 1.01
"""Times the best step: up to here every layout is priced."""
_NEAR = 1.05
"""Times the best step: up to here what may be the best of its degrees is priced, further off a few of them."""
_TRIES = 4
_FINALISTS = 16
_FEW = 6
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
    def order(self) -> tuple[float, int, int, int, int, int, int, int, str, str]:
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
            a.relief,
            str(a.sequence_mode),
            a.recompute,
        )

    @property
    def complexity(self) -> int:
        """How many axes beside dp are in use, and how many extras of schedule, sequence and recomputation."""
        a = self.layout
        extras = (a.chunks > 1, a.relief > 0, a.sequence_mode is not None, a.recompute != "none", a.zero > 1)
        return sum(size > 1 for size in (a.tp, a.pp, a.sp, a.ep)) * len(extras) + sum(extras)


def best_of(candidates: Sequence[Candidate]) -> Candidate:
    """Return the fastest candidate, or the simplest one of those that are as fast as far as a prediction can tell."""
    fastest = min(candidate.time.step for candidate in candidates)
    equal = [candidate for candidate in candidates if candidate.time.step <= (1 + SAME) * fastest]
    return min(equal, key=lambda candidate: (candidate.complexity, candidate.order))


@dataclass(frozen=True)
class Survey:
    """All legal layouts that are worth comparing."""

    candidates: list[Candidate]
    any_legal: bool
    least: Candidate | None
    """The one that needs least memory, when none fits."""


def survey(problem: Problem, limit_gib: float, *, neighbours: bool = True) -> Survey:
    """Price all legal layouts that can be the best ones or say something about them.

    Recomputation costs time and saves memory, so of the policies of one layout only the fastest one that fits
    can be the best; the fastest of all is kept, too, to say what memory would bring. Layouts whose bare compute
    takes longer than ``FAR`` times the best step are passed over.

    Args:
        problem: What to lay out.
        limit_gib: What a plan may fill of a GPU.
        neighbours: Also price what is only compared with the best one.
    """
    collects = gc.isenabled()
    gc.disable()  # Hundreds of thousands of small records without cycles.
    try:
        return _survey(problem, limit_gib, neighbours)
    finally:
        if collects:
            gc.enable()


def _survey(problem: Problem, limit_gib: float, neighbours: bool) -> Survey:
    search = _Search(problem, limit_gib)
    step = problem.runtime.least_step
    promising = sorted((step(base), index, base) for index, base in enumerate(legal_bases(problem)))
    for least_s, _, base in promising:
        if least_s > (FAR if neighbours else _CLOSE) * search.best_s:
            break
        if least_s <= search.dull_s(base, neighbours):
            search.visit(base, least_s, compared=neighbours)
    if neighbours and (best := search.best):
        own = best.layout
        for least_s, _, base in promising:
            if (base.tp, base.pp, base.sp, base.ep) == (own.tp, own.pp, own.sp, own.ep):
                search.visit(base, least_s, every_one=True)
    any_legal = bool(promising)
    least = None if search.candidates or not any_legal else _least(problem)
    found = search.candidates + (search.near_misses() if neighbours else [])
    return Survey(_refined(problem, found, limit_gib, _FINALISTS if neighbours else _FEW), any_legal, least)


class _Search:
    """The candidates found so far."""

    def __init__(self, problem: Problem, limit_gib: float) -> None:
        self.problem, self.limit_gib = problem, limit_gib
        self.policies = recompute_policies(problem)
        self.candidates: list[Candidate] = []
        self.best: Candidate | None = None
        self.best_s = float("inf")
        """Seconds of the best step found so far."""
        self._kept: set[Layout] = set()
        self._best_of: dict[tuple[int, int, int, int], tuple[float, int]] = {}
        """Best step of all degrees, and of how many."""
        self._missed: dict[tuple[object, ...], tuple[Layout, float]] = {}
        self._too_large: dict[Layout, dict[int, int]] = {}
        """Smallest microbatch that does not fit, by ZeRO stage: a larger one never needs less memory."""

    def dull_s(self, layout: Layout, compared: bool) -> float:
        """Return seconds of a step from which on a layout says nothing new.

        Args:
            layout: Only its degrees matter.
            compared: The best one of its degrees says something, for the reasons, if it is near the best of all.
        """
        close = _CLOSE * self.best_s
        if not compared:
            return close
        far, near = FAR * self.best_s, _NEAR * self.best_s
        of_degrees, tries = self._best_of.get((layout.tp, layout.pp, layout.sp, layout.ep), (float("inf"), 0))
        return max(close, far if of_degrees > far and tries < _TRIES else min(near, of_degrees))

    def visit(self, base: Layout, least_s: float, *, compared: bool = False, every_one: bool = False) -> None:
        """Price a layout for every ZeRO stage with the fastest recomputation that fits.

        Args:
            base: With the fastest recomputation; its own ZeRO stage does not matter.
            least_s: What its step takes at least.
            compared: Price also what can be the best one of its degrees only.
            every_one: Price what can be neither, too.
        """
        too_large = self._too_large.setdefault(_but_for_its_size(base), {})
        zeros = [
            zero
            for zero in zero_stages(self.problem.settings, base)
            if too_large.get(zero, base.microbatch) >= base.microbatch
        ]
        if not zeros:
            return
        runtime, limit = self.problem.runtime, self.limit_gib
        # Most of what does not fit is far off with the policy that needs least, and no other need be looked at.
        totals = runtime.memory_model(base).totals(base, zeros, (self.policies[-1], *self.policies[:-1]))
        least = next(totals)
        too_large.update((zero, base.microbatch) for zero, size in zip(zeros, least, strict=True) if size / GIB > limit)
        if min(least) > _HOPELESS * limit * GIB:
            return
        still_open = list(range(len(zeros)))
        last = len(self.policies) - 1
        for place, policy in enumerate(self.policies):
            bound = runtime.least_step(_with(base, zeros[0], policy)) if place else least_s
            if not every_one and bound > self.dull_s(base, compared):
                return  # Policies that come later are slower still.
            of_zero = next(totals) if place < last else least
            for position in still_open:
                gib = of_zero[position] / GIB
                if gib > _HOPELESS * limit:
                    continue
                if gib > limit:
                    self._miss(base, zeros[position], policy, gib)
                elif every_one or bound <= self.dull_s(base, compared):
                    self._keep(_with(base, zeros[position], policy), gib)
            still_open = [position for position in still_open if of_zero[position] / GIB > limit]
            if not still_open:
                return

    def _keep(self, layout: Layout, gib: float) -> None:
        if layout in self._kept:
            return
        candidate = _priced(self.problem, layout, gib)
        self._kept.add(layout)
        self.candidates.append(candidate)
        if candidate.supported:
            degrees = (layout.tp, layout.pp, layout.sp, layout.ep)
            best, tries = self._best_of.get(degrees, (float("inf"), 0))
            self._best_of[degrees] = min(candidate.time.step, best), tries + 1
        if candidate.supported and (self.best is None or candidate.order < self.best.order):
            self.best, self.best_s = candidate, candidate.time.step

    def _miss(self, base: Layout, zero: Literal[0, 1, 2, 3], policy: tuple[RecomputePolicy, int], gib: float) -> None:
        """Note the layout that misses the memory by least, of every degree, ZeRO stage, policy and size."""
        key = (base.tp, base.pp, base.sp, base.ep, zero, base.microbatch, policy[0])
        known = self._missed.get(key)
        if known is None or gib < known[1]:
            self._missed[key] = (_with(base, zero, policy), gib)

    def near_misses(self) -> list[Candidate]:
        """Return what a little more memory would allow, as far as it could be faster than what fits."""
        runtime = self.problem.runtime
        return [
            _priced(self.problem, layout, gib)
            for layout, gib in self._missed.values()
            if runtime.least_step(layout) < self.best_s
        ]


def fits_somehow(problem: Problem, limit_gib: float) -> bool:
    """Whether any legal layout fits into the memory."""
    found = _smallest(problem, enough_gib=limit_gib)
    return found is not None and found[1] <= limit_gib


def _least(problem: Problem) -> Candidate | None:
    """The layout that needs least memory; ties go to the first one."""
    found = _smallest(problem)
    return None if found is None else _priced(problem, *found)


def _smallest(problem: Problem, enough_gib: float = 0.0) -> tuple[Layout, float] | None:
    """Return the layout that needs least memory and what it needs, or the first one that needs ``enough_gib``."""
    policy = recompute_policies(problem)[-1]
    smallest_of: dict[Layout, Layout] = {}
    for base in legal_bases(problem):
        known = smallest_of.setdefault(_but_for_its_size(base), base)
        if base.microbatch < known.microbatch:
            smallest_of[_but_for_its_size(base)] = base
    best: tuple[Layout, float] | None = None
    for base in smallest_of.values():
        zeros = zero_stages(problem.settings, base)
        model = problem.runtime.memory_model(base)
        if best is not None and min(model.states(base, zeros)) / GIB >= best[1]:
            continue
        for zero, num_bytes in zip(zeros, next(model.totals(base, zeros, [policy])), strict=True):
            if best is None or num_bytes / GIB < best[1]:
                best = _with(base, zero, policy), num_bytes / GIB
        if best is not None and best[1] <= enough_gib:
            break
    return best


def _but_for_its_size(base: Layout) -> Layout:
    """What layouts have in common of which one with a larger microbatch never needs less memory.

    The first two microbatches of a step need no sum of gradients, so their number matters up to the third.
    """
    return base._replace(microbatch=0, num_microbatches=min(3, base.num_microbatches))


def _with(base: Layout, zero: Literal[0, 1, 2, 3], policy: tuple[RecomputePolicy, int]) -> Layout:
    return base._replace(zero=zero, recompute=policy[0], every_kth=policy[1])


def _priced(problem: Problem, layout: Layout, memory_gib: float) -> Candidate:
    return Candidate(
        layout=layout,
        memory_gib=memory_gib,
        time=problem.runtime.step(layout, simulate=False),
        num_unsupported=len(unsupported_layout(layout)),
    )


def _refined(problem: Problem, candidates: list[Candidate], limit_gib: float, count: int) -> list[Candidate]:
    """Simulate the schedules of the most promising candidates, whichever reason they are compared for."""
    order = sorted(range(len(candidates)), key=lambda index: candidates[index].order)
    fitting = [index for index in order if candidates[index].memory_gib <= limit_gib]
    runnable = [index for index in fitting if candidates[index].supported]
    finalists = {*runnable[:count], *fitting[: count // 2], *order[: count // 2]}
    for index in sorted(finalists):
        old = candidates[index]
        if old.layout.pp > 1 and old.layout.pp * old.layout.chunks <= _MAX_SIMULATED_STAGES:
            candidates[index] = replace(old, time=problem.runtime.step(old.layout))
    return candidates
