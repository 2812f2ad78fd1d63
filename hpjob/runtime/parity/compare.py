"""Put a case's parts together and compare it with the reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hpjob.recipe.model import Precision
from hpjob.runtime.parity.case import Case
from hpjob.runtime.parity.reference import Trajectory
from hpjob.runtime.parity.worker import Part, RankRecord, train_case
from hpjob.runtime.process_pool import ProcessPool, WorkerError


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest relative difference that passes."""

    loss: float
    gradient: float
    weight: float


# bf16 has 8 bits of mantissa (2^-8 = 0.4 %). Sums over tp ranks round in another order than one matmul does;
# over some tens of operations in a row that leaves about 1 % of a gradient's norm, while a dropped reduction
# leaves tens of percent. The reference computes in bf16 too.
# fp16 has 11 bits. Limits of weights are those of 20 steps.
TOLERANCES: dict[Precision, Tolerance] = {
    "fp32": Tolerance(loss=1e-5, gradient=1e-5, weight=1e-4),
    "bf16": Tolerance(loss=5e-3, gradient=3e-2, weight=1e-2),
    "fp16": Tolerance(loss=1e-3, gradient=5e-3, weight=5e-3),
}
# Of linear layers in 8 bits against the reference in bf16: e4m3 has 4 bits (2^-4 = 6 %). What must hold is the limit
# of the mean loss below, which is the same for all; one step or gradient may be further off.
FP8_TOLERANCE = Tolerance(loss=3e-2, gradient=2e-1, weight=2e-2)


TAIL_STEPS = 20
TAIL_TOLERANCE = 5e-3


@dataclass(frozen=True, slots=True)
class Outcome:
    """The line printed for a case; figures are None when it did not run."""

    case: str
    world: int
    loss_rel: float | None
    tail_loss_rel: float | None
    """Of the mean loss of the last :data:`TAIL_STEPS` steps: whether a long run drifts."""
    grad_rel: float | None
    weight_rel: float | None
    steps: int
    ok: bool
    reason: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the fields to print; ``reason`` only where there is one."""
        fields = asdict(self)
        if self.reason is None:
            fields.pop("reason")
        return fields


def compare_case(pool: ProcessPool, case: Case, reference: Trajectory, steps: int, broken: str | None) -> Outcome:
    """Train a case on the pool and compare it with a reference of as many steps."""
    try:
        records: list[RankRecord] = pool.run(train_case, case, steps, broken, world=case.world)
    except WorkerError as error:
        return not_run(case.text, case.world, steps, error.refusal or str(error))
    if any(record.skipped != reference.skipped for record in records):
        left_out = (
            f"updates left out in steps {records[0].skipped}, by the reference in {reference.skipped}; "
            "at the very limit of fp16 rounding decides: compare again with another initial_scale"
        )
        return not_run(case.text, case.world, steps, left_out)
    gradients, _ = assemble(part for record in records for part in record.gradients)
    weights, differing = assemble(part for record in records for part in record.weights)
    loss_rel = max(_loss_difference(record.losses, reference.losses) for record in records)
    tail_rel = max(_tail_difference(record.losses, reference.losses) for record in records)
    grad_rel = relative_difference(gradients, reference.gradients)
    weight_rel = relative_difference(weights, reference.weights)
    limit = FP8_TOLERANCE if case.recipe.parallel.use_fp8 else TOLERANCES[case.plan.precision]
    # Written so that a NaN fails.
    # Steps of rounded gradients part the weights further, evenly on average.
    is_exact = case.plan.precision == "fp32" and not case.recipe.parallel.use_fp8
    weight_limit = limit.weight * (1.0 if is_exact else max(1.0, steps / TAIL_STEPS))
    close = loss_rel <= limit.loss and grad_rel <= limit.gradient and weight_rel <= weight_limit
    close = close and tail_rel <= TAIL_TOLERANCE
    reason = f"replicas differ: {', '.join(differing[:3])}" if differing else None
    ok = close and not differing
    return Outcome(case.text, case.world, loss_rel, tail_rel, grad_rel, weight_rel, steps, ok, reason)


def not_run(case: str, world: int, steps: int, reason: str) -> Outcome:
    """Return the outcome of a case that cannot be compared."""
    return Outcome(case, world, None, None, None, None, steps, False, reason)


def assemble(parts: Iterable[Part]) -> tuple[dict[str, Tensor], list[str]]:
    """Put parts of parameters together.

    Returns:
        Whole tensors by name, and the names of those whose copies are not bitwise equal.

    Raises:
        ValueError: No rank holds some elements of a parameter.
    """
    whole: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    differing = []
    for name, region, part in parts:
        target = whole.setdefault(name, torch.zeros(region.shape))
        seen = filled.setdefault(name, torch.zeros(region.shape, dtype=torch.bool))
        if (seen[region.slices] & (target[region.slices] != part)).any():
            differing.append(name)
        target[region.slices] = part
        seen[region.slices] = True
    for name, seen in filled.items():
        if not seen.all():
            raise ValueError(f"no rank holds all of {name}")
    return whole, differing


def relative_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the norm of the difference over the norm of what was expected, over all parameters together.

    Raises:
        ValueError: The names differ.
    """
    if found.keys() != expected.keys():
        raise ValueError(f"parameters differ: {sorted(found.keys() ^ expected.keys())[:4]}")
    difference = sum(
        (found[name].view_as(value).double() - value.double()).square().sum().item() for name, value in expected.items()
    )
    norm = sum(value.double().square().sum().item() for value in expected.values())
    return float((difference / norm) ** 0.5) if expected else 0.0


def _loss_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    differences = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
    return float(torch.tensor(differences, dtype=torch.float64).max())


def _tail_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    mean = sum(expected[-TAIL_STEPS:])
    return abs(sum(found[-TAIL_STEPS:]) - mean) / abs(mean)
