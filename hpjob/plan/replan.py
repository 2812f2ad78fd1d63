"""The same training run on another number of nodes: global batch, sequence and data order stay.

What the recipe leaves open is chosen anew. A value that it fixes is kept when any legal layout of the new
ranks keeps it and fits; otherwise as few values as possible are released, those that matter least first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from hpjob.core.errors import HpjobError, NothingFitsError, UserInputError
from hpjob.core.schema import Persisted
from hpjob.plan.memory import memory_limit_gib
from hpjob.plan.model import Plan
from hpjob.plan.planner import make_plan, make_problem
from hpjob.plan.problem import Problem
from hpjob.plan.search import fits_somehow
from hpjob.recipe.model import ParallelSettings, Recipe
from hpjob.topology.model import Topology

_COSTS: dict[str, int] = {
    "num_microbatches": 1,
    "microbatch_size": 2,
    "num_model_chunks": 4,
    "gradient_checkpoint_config": 6,
    "pp_style": 8,
    "zero_shard_size": 9,
    "zero_stage": 10,
    "ep_size": 16,
    "sequence_parallelism_mode": 16,
    "sp_size": 24,
    "pp_size": 32,
    "tp_size": 64,
}
"""How much it takes to release a fixed value: how often a step is cut into microbatches is cheap, tp is dear."""


class Replan(Persisted):
    """A plan for other nodes beside the one that it replaces."""

    plan: Plan
    previous: Plan
    recipe: Recipe
    """The run's recipe with the values that had to be released set to ``auto``."""
    old_step_s: float | None
    """Predicted seconds of a step on the old nodes; None = the old plan was not priced."""
    new_step_s: float
    checkpoint_loads: bool = True
    """Always: tensors are saved under global names and cut anew when they are read."""
    notes: tuple[str, ...] = ()
    """One sentence for every fixed value that could not be kept."""


def replan(
    recipe: Recipe,
    topology: Topology,
    *,
    previous: Plan,
    gpus_per_node: int | None = None,
    site: str | None = None,
) -> Replan:
    """Plan a run for other nodes at the same global batch, sequence length and data order.

    Args:
        recipe: The run's recipe; its fixed values are kept where that is possible.
        topology: The nodes to run on; all of them are used.
        previous: The plan that the run had.
        gpus_per_node: Ranks a node; None = as many as before where the nodes have them.
        site: File with measured constants; see :func:`hpjob.plan.planner.make_plan`.

    Raises:
        UserInputError: The recipe asks for another global batch or sequence length than the run has.
        NothingFitsError: No legal layout of these nodes fits; the hint names node counts that work.
    """
    _same_data(recipe, previous)
    per_node = gpus_per_node or _ranks_per_node(topology, previous)
    try:
        # Most recipes keep everything; only what fails is looked into.
        plan = make_plan(recipe, topology, gpus_per_node=per_node, site=site)
        return _result(plan, previous, recipe, ())
    except HpjobError as error:
        refused = error
    problem = make_problem(recipe, topology, gpus_per_node=per_node, site=site)
    limit = memory_limit_gib(problem.hardware)
    for released in _releases(problem.settings):
        settings = problem.settings.model_copy(update=_auto(released))
        if not fits_somehow(replace(problem, settings=settings), limit):
            continue
        open_recipe = recipe.model_copy(update={"parallel": settings})
        plan = make_plan(open_recipe, topology, gpus_per_node=per_node, site=site)
        notes = tuple(_sentence(name, recipe.parallel, plan) for name in released)
        return _result(plan, previous, open_recipe, notes)
    raise _nothing(refused, problem, topology, previous)


def _same_data(recipe: Recipe, previous: Plan) -> None:
    wanted = (recipe.training.global_batch_size, recipe.data.seq_length)
    had = (previous.global_batch_size, previous.seq_length)
    if wanted != had:
        raise UserInputError(
            f"the run has {had[0]} sequences of {had[1]} tokens a step, the recipe asks for "
            f"{wanted[0]} of {wanted[1]}: the order of its data would change",
            hint="keep training.global_batch_size and data.seq_length, or start another run",
        )


def _ranks_per_node(topology: Topology, previous: Plan) -> int | None:
    known = [len(node.gpus) for node in topology.nodes if node.gpus]
    return previous.gpus_per_node if not known or min(known) >= previous.gpus_per_node else None


def _result(plan: Plan, previous: Plan, recipe: Recipe, notes: tuple[str, ...]) -> Replan:
    return Replan(
        plan=plan,
        previous=previous,
        recipe=recipe,
        old_step_s=previous.time.step_s or None,
        new_step_s=plan.time.step_s,
        notes=notes,
    )


def _fixed_names(settings: ParallelSettings) -> list[str]:
    free = ParallelSettings()
    return [name for name in _COSTS if getattr(settings, name) != getattr(free, name)]


def _releases(settings: ParallelSettings) -> Iterator[tuple[str, ...]]:
    """Sets of fixed values to give up, the cheapest first."""
    names = _fixed_names(settings)
    sets = [chosen for size in range(1, len(names) + 1) for chosen in combinations(names, size)]
    yield from sorted(sets, key=lambda chosen: (sum(_COSTS[name] for name in chosen), chosen))


def _auto(names: tuple[str, ...]) -> dict[str, object]:
    free = ParallelSettings()
    return {name: getattr(free, name) for name in names}


def _sentence(name: str, before: ParallelSettings, plan: Plan) -> str:
    """Say which fixed value was given up for what."""
    pipeline, degrees = plan.pipeline, plan.degrees
    now: dict[str, object] = {
        "num_microbatches": pipeline.num_microbatches,
        "microbatch_size": pipeline.microbatch_size,
        "num_model_chunks": pipeline.num_model_chunks,
        "gradient_checkpoint_config": f"{plan.recompute} recompute",
        "pp_style": pipeline.style,
        "zero_stage": plan.zero_stage,
        "zero_shard_size": "all data-parallel ranks",
        "ep_size": degrees.ep,
        "sequence_parallelism_mode": plan.sequence_parallelism_mode or "none",
        "sp_size": degrees.sp,
        "pp_size": degrees.pp,
        "tp_size": degrees.tp,
    }
    old = getattr(before, name)
    if name == "gradient_checkpoint_config":
        return f"the recipe's {old.policy} recompute does not fit on {degrees.world_size} ranks: now {now[name]}"
    batch = ""
    if name in ("num_microbatches", "microbatch_size"):
        batch = f" with a global batch of {plan.global_batch_size}"
    return f"the recipe's {name} {old} does not fit {degrees.world_size} ranks{batch}: now {now[name]}"


def _nothing(refused: HpjobError, problem: Problem, topology: Topology, previous: Plan) -> HpjobError:
    """Return the error with the nearest node counts that have a plan."""
    count = len(topology.nodes)
    released = _auto(tuple(_fixed_names(problem.settings)))
    free = replace(problem, settings=problem.settings.model_copy(update=released))
    per_node, limit = problem.hardware.gpus_per_node, memory_limit_gib(problem.hardware)
    fewer = next(
        (n for n in range(count - 1, 0, -1) if fits_somehow(replace(free, world_size=n * per_node), limit)), None
    )
    words = [f"use --nodes {fewer}"] if fewer else []
    if previous.num_nodes not in (count, fewer):
        words.append(f"stay on {previous.num_nodes} node{'s' if previous.num_nodes > 1 else ''}")
    return NothingFitsError(refused.message, hint="; or ".join(words) or refused.hint)
