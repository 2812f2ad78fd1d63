"""What binds a plan, and what one change would bring: other nodes, more memory, more or less recomputation."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from hpjob.plan.enumeration import recompute_policies
from hpjob.plan.losses import KINDS, exceeds_words
from hpjob.plan.model import Change
from hpjob.plan.problem import Problem
from hpjob.plan.reasons import recompute_words, summary
from hpjob.plan.search import Candidate, best_of, survey

_WORDS = {
    "compute": "compute",
    "bubble": "the pipeline's bubble",
    "tp_comm": "traffic inside layers (tp, sp, ep)",
    "pp_comm": "transfers between stages",
    "dp_comm": "gradient and weight traffic (dp)",
    "optimizer": "the optimizer",
}


def binding(best: Candidate, candidates: list[Candidate], limit_gib: float) -> str:
    """Say what keeps a step from being shorter: memory, or the kind of time beside compute that costs most."""
    missed = _fastest_missed(best, candidates, limit_gib)
    shares = {kind: getattr(best.time, kind) / best.time.step for kind in KINDS}
    second = max((kind for kind in KINDS if kind != "compute"), key=lambda kind: shares[kind])
    time_ = f"compute is {100 * shares['compute']:.0f} % of the step, {_WORDS[second]} {100 * shares[second]:.1f} %"
    if missed is None:
        return f"time binds, not memory: {time_}"
    gain = 100 * (1 - missed.time.step / best.time.step)
    needed = exceeds_words(missed.memory_gib, limit_gib)
    return f"memory binds: {summary(missed.layout)} would be {gain:.1f} % faster but needs {needed}; {time_}"


def changes(
    problem: Problem, best: Candidate, candidates: list[Candidate], limit_gib: float, num_nodes: int
) -> tuple[Change, ...]:
    """Return what single changes bring, each computed; those that have no plan are said to have none."""
    counts = dict.fromkeys((num_nodes - 1, num_nodes + 1, 2 * num_nodes))
    found = [_nodes(problem, best, limit_gib, num_nodes, count) for count in counts]
    found.append(_memory(problem, best, candidates, limit_gib))
    found += [_recompute(problem, best, limit_gib, faster) for faster in (True, False)]
    return tuple(change for change in found if change is not None)


def _change(what: str, best: Candidate, other: Candidate) -> Change:
    return Change(
        change=what,
        summary=summary(other.layout),
        step_s=round(other.time.step, 4),
        memory_gib=round(other.memory_gib, 2),
        percent=round(100 * (other.time.step / best.time.step - 1), 2),
    )


def _nodes(problem: Problem, best: Candidate, limit_gib: float, now: int, count: int) -> Change | None:
    """The best plan on other nodes with the degrees inside a pipeline stage as they are."""
    if count < 1:
        return None
    pinned = {"tp_size": best.layout.tp, "sp_size": best.layout.sp} | _mode(best)
    if (count * problem.world_size // now) % (best.layout.tp * best.layout.ep) == 0:
        pinned["ep_size"] = best.layout.ep
    settings = problem.settings.model_copy(update=pinned)
    per_node = problem.world_size // now
    other = replace(problem, settings=settings, world_size=count * per_node)
    fitting = [
        c for c in survey(other, limit_gib, neighbours=False).candidates if c.memory_gib <= limit_gib and c.supported
    ]
    words = f"{count} node{'s' if count > 1 else ''}"
    if not fitting:
        return Change(change=words, summary=f"no legal plan that fits with tp {best.layout.tp} · sp {best.layout.sp}")
    return _change(words, best, best_of(fitting))


def _mode(best: Candidate) -> dict[str, object]:
    if best.layout.sequence_mode is None:
        return {"enable_sequence_parallelism": False}
    return {"sequence_parallelism_mode": best.layout.sequence_mode}


def _fastest_missed(best: Candidate, candidates: list[Candidate], limit_gib: float) -> Candidate | None:
    faster = [c for c in candidates if c.memory_gib > limit_gib and c.supported and c.time.step < best.time.step]
    return min(faster, key=lambda candidate: (candidate.memory_gib, candidate.order), default=None)


def _memory(problem: Problem, best: Candidate, candidates: list[Candidate], limit_gib: float) -> Change | None:
    missed = _fastest_missed(best, candidates, limit_gib)
    if missed is None:
        return None
    more = ceil(10 * (missed.memory_gib - limit_gib)) / 10
    return _change(f"{more:.1f} GiB more a {problem.hardware.unit}", best, missed)


def _recompute(problem: Problem, best: Candidate, limit_gib: float, faster: bool) -> Change | None:
    """The neighbouring policy of the same layout."""
    policies = recompute_policies(problem)
    layout = best.layout
    place = policies.index((layout.recompute, layout.every_kth)) + (-1 if faster else 1)
    if not 0 <= place < len(policies):
        return None
    recompute, k = policies[place]
    tried = layout._replace(recompute=recompute, every_kth=k)
    other = replace(best, layout=tried, memory_gib=problem.runtime.worst_gib(tried), time=problem.runtime.step(tried))
    words = "no recompute" if recompute == "none" else recompute_words(tried)
    return _change(words if other.memory_gib <= limit_gib else f"{words} (does not fit)", best, other)
