"""Run many parity cases; references are trained once for each model and batch size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpjob.core.errors import HpjobError
from hpjob.runtime.parity.case import Case, parse_case
from hpjob.runtime.parity.compare import Outcome, compare_case, not_run
from hpjob.runtime.parity.reference import Trajectory, train_reference
from hpjob.runtime.process_pool import ProcessPool


def run_cases(
    pool: ProcessPool, lines: Sequence[str], *, steps: int, model_type: str = "llama", broken: str | None = None
) -> Iterator[Outcome]:
    """Yield the outcome of every case, in order.

    Args:
        pool: Its size is the world that cases fill.
        lines: Cases as :func:`hpjob.runtime.parity.case.parse_case` reads them.
        steps: Optimizer steps.
        model_type: Model family.
        broken: Name of a deliberate fault.
    """
    references = References(steps)
    for line in lines:
        try:
            case = parse_case(line, world=pool.size, steps=steps, model_type=model_type)
        except HpjobError as error:
            yield not_run(line, pool.size, steps, error.message)
            continue
        if case.world > pool.size:
            reason = f"needs {case.world} processes, --world is {pool.size}"
            yield not_run(line, case.world, steps, reason)
            continue
        yield compare_case(pool, case, references.of(case), steps, broken)


class References:
    """One-process runs, each done once.

    Args:
        steps: Optimizer steps.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._kept: dict[str, Trajectory] = {}

    def of(self, case: Case) -> Trajectory:
        """Return what a case is compared with."""
        # In fp16, microbatches decide which steps overflow.
        microbatch_size = case.plan.pipeline.microbatch_size if case.plan.precision == "fp16" else None
        key = f"{microbatch_size} {_reference_key(case)}"
        if key not in self._kept:
            self._kept[key] = train_reference(case.recipe, self._steps, case.documents, microbatch_size=microbatch_size)
        return self._kept[key]


def _reference_key(case: Case) -> str:
    """Return what a one-process run depends on."""
    recipe = case.recipe
    parts = (recipe.model, recipe.data, recipe.training, recipe.optimizer)
    return "\n".join(
        [
            f"{recipe.parallel.precision} {recipe.parallel.initial_scale} {case.documents}",
            *(part.model_dump_json() for part in parts),
        ]
    )
