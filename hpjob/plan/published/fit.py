"""Fits the few corrections of the cost model to published runs, held to their physical starting values.

Gauss-Newton on the logarithms of predicted over measured time. Every family weighs the same however many
rows it has, far-off rows count less (Huber), and each correction is pulled to its start with a width that
says how well it is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, fsum, log

from hpjob.plan.constants import CALIBRATION_NAMES, Calibration

PRIOR_WIDTH: dict[str, float] = {
    "gemm": 0.04,
    "gemm_a100": 0.05,
    "gemm_h100": 0.08,
    "gemm_b200": 0.2,
    "tail_waves": 0.5,
    "misaligned": 0.5,
    "attention": 0.15,
    "scores": 0.3,
    "traffic": 0.2,
    "host": 0.2,
    "island": 0.2,
    "network": 0.3,
    "hop": 0.5,
    "jitter": 0.5,
    "step_ms": 0.4,
}
"""Standard deviation of the logarithm of each correction before any run was seen."""

_ROW_SPREAD = 0.08
_FAMILY_WEIGHT = 5.0
"""Independent observations that one family counts as, however many rows it has."""
_STEP = 0.03


@dataclass(frozen=True, slots=True)
class Observation:
    """A row to fit on."""

    family: str
    predicted: Callable[[Calibration], float]
    measured: float


class Fitter:
    """Fits on any subset of families; slopes are taken once, at the starting values that no run has seen."""

    def __init__(self, observations: Sequence[Observation]) -> None:
        self.observations = list(observations)
        self.names = [name for name in CALIBRATION_NAMES if name in PRIOR_WIDTH]
        zero = dict.fromkeys(self.names, 0.0)
        base = _residuals(self.observations, _moved(zero))
        self.columns = []
        for name in self.names:
            moved = _residuals(self.observations, _moved(zero | {name: _STEP}))
            self.columns.append([(b - a) / _STEP for a, b in zip(base, moved, strict=True)])

    def fit(self, *, without: str | None = None, rounds: int = 5) -> Calibration:
        """Return the corrections that explain the observations best, those of one family left out."""
        kept = [index for index, o in enumerate(self.observations) if o.family != without]
        observations = [self.observations[index] for index in kept]
        columns = [[column[index] for index in kept] for column in self.columns]
        sizes = Counter(o.family for o in observations)
        offsets = dict.fromkeys(self.names, 0.0)
        for _ in range(rounds):
            residuals = _residuals(observations, _moved(offsets))
            weights = [
                _FAMILY_WEIGHT / sizes[o.family] / _ROW_SPREAD**2 * min(1.0, 1.5 * _ROW_SPREAD / max(abs(r), 1e-9))
                for o, r in zip(observations, residuals, strict=True)
            ]
            change = _normal_equations(self.names, columns, residuals, weights, offsets)
            for name, delta in zip(self.names, change, strict=True):
                # A step of more than half an e-fold would leave the range in which the slopes hold.
                offsets[name] += max(-0.5, min(0.5, delta))
        return _moved(offsets)


def _moved(offsets: dict[str, float]) -> Calibration:
    start = Calibration()
    return start.updated({name: getattr(start, name) * exp(offset) for name, offset in offsets.items()})


def _residuals(observations: Sequence[Observation], fit: Calibration) -> list[float]:
    return [log(observation.predicted(fit) / observation.measured) for observation in observations]


def _normal_equations(
    names: list[str],
    columns: list[list[float]],
    residuals: list[float],
    weights: list[float],
    offsets: dict[str, float],
) -> list[float]:
    size = len(names)
    matrix = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for i in range(size):
        weighted = [w * c for w, c in zip(weights, columns[i], strict=True)]
        for j in range(i, size):
            matrix[i][j] = matrix[j][i] = fsum(a * b for a, b in zip(weighted, columns[j], strict=True))
        right[i] = -fsum(a * r for a, r in zip(weighted, residuals, strict=True))
        precision = 1.0 / PRIOR_WIDTH[names[i]] ** 2
        matrix[i][i] += precision
        right[i] -= precision * offsets[names[i]]
    return _solve(matrix, right)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small symmetric positive system by elimination; the prior keeps it regular."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(i + 1, size):
            factor = rows[r][i] / rows[i][i]
            rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = fsum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution
