"""What the search passes over cannot be the best; what is equally fast is decided by simplicity."""

from dataclasses import replace

import pytest

from hpjob.plan.enumeration import legal_layouts
from hpjob.plan.memory import memory_limit_gib
from hpjob.plan.planner import make_problem
from hpjob.plan.problem import Problem
from hpjob.plan.search import SAME, Candidate, best_of, fits_somehow, survey
from hpjob.recipe.load import load_recipe
from hpjob.topology.load import load_machine, machine_topology

_SMALL = ("model.num_hidden_layers=8", "training.global_batch_size=16")


def _problem(recipe: str, machine: str, *overrides: str) -> Problem:
    return make_problem(load_recipe(recipe, list(overrides)), machine_topology(load_machine(machine), 1))


@pytest.mark.parametrize("recipe", ["7b", "qwen3-30b-a3b"])
def test_the_least_memory_is_that_of_all_layouts(recipe: str) -> None:
    problem = _problem(recipe, "hgx-a100-4", *_SMALL)
    least = min(problem.runtime.worst_gib(layout) for layout in legal_layouts(problem))
    found = survey(problem, 0.9 * least)
    assert all(candidate.memory_gib > 0.9 * least for candidate in found.candidates), "near misses"
    assert found.least is not None
    assert found.least.memory_gib == pytest.approx(least)
    assert fits_somehow(problem, 1.001 * least)
    assert not fits_somehow(problem, 0.999 * least)


@pytest.mark.parametrize("recipe", ["7b", "qwen3-30b-a3b"])
def test_the_bound_is_below_every_step_and_the_best_one_is_found(recipe: str) -> None:
    problem = _problem(recipe, "hgx-h100", *_SMALL)
    limit = memory_limit_gib(problem.hardware)
    runtime = problem.runtime
    fastest = float("inf")
    for layout in list(legal_layouts(problem))[::7]:
        step = runtime.step(layout, simulate=False).step
        assert runtime.least_step(layout) <= step
        fastest = min(fastest, step if runtime.worst_gib(layout) <= limit else fastest)
    found = [c for c in survey(problem, limit).candidates if c.memory_gib <= limit]
    assert best_of(found).time.step <= fastest * (1 + SAME)


def test_of_what_is_equally_fast_the_simplest_is_taken() -> None:
    problem = _problem("7b", "hgx-h100", *_SMALL)
    first = survey(problem, memory_limit_gib(problem.hardware)).candidates[0]
    plain = first.layout._replace(tp=1, pp=1, sp=1, dp=8, chunks=1, relief=0, zero=1, sequence_mode=None)

    def candidate(seconds: float, **changes: object) -> Candidate:
        time = replace(first.time, compute=seconds, bubble=0, tp_comm=0, pp_comm=0, dp_comm=0, optimizer=0)
        return replace(first, layout=plain._replace(**changes), time=time)  # type: ignore[arg-type]

    simple, complex_ = candidate(1.0008), candidate(1.0, tp=2, pp=2, dp=2)
    assert best_of([complex_, simple]) == best_of([simple, complex_]) == simple
    assert best_of([complex_, candidate(1.003)]) == complex_
