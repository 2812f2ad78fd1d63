"""How well predictions match a table: times, memory, ranking, and what runs out of memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum

from hpjob.plan.constants import Calibration
from hpjob.plan.memory import GIB
from hpjob.plan.published.fit import Fitter, Observation
from hpjob.plan.published.measured import Measured, measured
from hpjob.plan.published.predict import Prediction, predict
from hpjob.plan.published.rows import Case, Row, Unpredictable, read_case

_MIN_GROUP = 4
_OUTCOMES = ("ok", "oom")
_SEEN = (
    "calibration.yaml: refitted without the family that is scored under --leave-one-family-out",
    "frameworks.yaml (habits: memory a parameter, overlap, slack, host time): written down with all families in view",
    "gpus.yaml (parts of the peaks): from public kernel measurements, chosen with all families in view",
    "the safe part of a GPU's memory: from the spread of memory errors of all families",
)
"""What the figures of a family may owe to its own rows."""
_FIT_ROWS = 16
"""Rows of a family that a fit uses: more of the same say little."""


@dataclass(frozen=True)
class Scored:
    """One row with its prediction."""

    case: Case
    truth: Measured
    prediction: Prediction

    @property
    def time_error(self) -> float | None:
        return self.prediction.step_s / self.truth.step_s - 1 if self.truth.step_s else None

    @property
    def memory_error(self) -> float | None:
        if not self.truth.memory_gib or self.truth.outcome != "ok":
            return None
        memory = self.prediction.memory
        counted = memory.tensors if self.truth.memory_counts == "allocated" else memory.total
        return counted / GIB / self.truth.memory_gib - 1


@dataclass
class Table:
    """The rows of a table that can be predicted, and why the others cannot."""

    cases: list[tuple[Case, Measured]] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def read_table(rows: Iterable[Row]) -> Table:
    """Read all rows; rows that cannot be priced or that measured nothing are listed by reason."""
    table = Table()
    for index, given in enumerate(rows):
        # Short lines lack their last columns; without an id a row is named by its place.
        row = {name: value or "" for name, value in given.items() if isinstance(name, str)}
        row_id = row.get("id", "").strip() or f"row {index + 1}"
        try:
            case = read_case(row)
        except Unpredictable as reason:
            table.skipped[str(reason)].append(row_id)
            continue
        truth = measured(row, case)
        if truth.outcome not in _OUTCOMES:
            table.skipped[f"outcome not known: {truth.outcome}"].append(row_id)
        elif truth.outcome == "ok" and not truth.step_s and not truth.memory_gib:
            table.skipped["nothing measured that can be compared"].append(row_id)
        else:
            table.cases.append((case, truth))
    return table


def fitter_of(table: Table) -> Fitter:
    """Return a fitter on an even sample of every family's timed rows."""
    families: dict[str, list[tuple[Case, float]]] = defaultdict(list)
    for case, truth in table.cases:
        if truth.step_s and truth.outcome == "ok":
            families[case.family].append((case, truth.step_s))
    observations = []
    for rows in families.values():
        count = min(_FIT_ROWS, len(rows))
        for index in range(count):
            case, step = rows[index * len(rows) // count]
            observations.append(Observation(case.family, _predictor(case), step))
    return Fitter(observations)


def _predictor(case: Case) -> Callable[[Calibration], float]:
    return lambda fit: predict(case, fit).step_s


def predict_table(table: Table, fits: Mapping[str, Calibration] | None = None) -> list[Scored]:
    """Predict every row; ``fits`` gives each family its own corrections."""
    return [Scored(case, truth, predict(case, fits[case.family] if fits else None)) for case, truth in table.cases]


def report(scored: Sequence[Scored], skipped: Mapping[str, list[str]]) -> dict[str, object]:
    """Return all figures as plain data; errors are fractions."""
    families = {name: _family(rows) for name, rows in sorted(_by_family(scored).items())}
    timed = [f for f in families.values() if f["rows_time"]]
    remembered = [f for f in families.values() if f["rows_memory"]]
    ranking = _ranking(scored)
    return {
        "version": 1,
        "macro_mape_time": _mean([f["mape_time"] for f in timed]),
        "macro_bias_time": _mean([f["bias_time"] for f in timed]),
        "mape_memory": _mean([f["mape_memory"] for f in remembered]),
        "regret": _mean([group["regret"] for group in ranking]),
        "spearman": _mean([group["spearman"] for group in ranking]),
        "ranking_groups": len(ranking),
        **_memory_verdicts(scored),
        "families": families,
        "skipped": {reason: list(ids) for reason, ids in sorted(skipped.items())},
        "seen": list(_SEEN),
    }


def _by_family(scored: Sequence[Scored]) -> dict[str, list[Scored]]:
    families: dict[str, list[Scored]] = defaultdict(list)
    for row in scored:
        families[row.case.family].append(row)
    return families


def _family(rows: Sequence[Scored]) -> dict[str, float | int | None]:
    times = [error for row in rows if (error := row.time_error) is not None]
    memory = [error for row in rows if (error := row.memory_error) is not None]
    return {
        "rows_time": len(times),
        "mape_time": _mean([abs(error) for error in times]),
        "bias_time": _mean(times),
        "rows_memory": len(memory),
        "mape_memory": _mean([abs(error) for error in memory]),
        "bias_memory": _mean(memory),
    }


def _mean(values: Sequence[float | int | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return fsum(known) / len(known) if known else None


def _ranking(scored: Sequence[Scored]) -> list[dict[str, float]]:
    """Spearman and top-1 regret of every group of rows that differ only in layout."""
    groups: dict[tuple[str, ...], list[Scored]] = defaultdict(list)
    for row in scored:
        if row.truth.step_s and row.truth.outcome == "ok":
            groups[row.case.group].append(row)
    found = []
    for rows in groups.values():
        if len(rows) < _MIN_GROUP:
            continue
        truth = [float(row.truth.step_s or 0.0) for row in rows]
        guess = [row.prediction.step_s for row in rows]
        picked = truth[min(range(len(rows)), key=guess.__getitem__)]
        found.append({"regret": picked / min(truth) - 1, "spearman": spearman(truth, guess)})
    return found


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the rank correlation; ties share their mean rank, and a constant side gives 0."""
    a, b = _ranks(left), _ranks(right)
    mean = (len(a) - 1) / 2
    covariance = fsum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    spread = fsum((x - mean) ** 2 for x in a) * fsum((y - mean) ** 2 for y in b)
    return float(covariance / spread**0.5) if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for position in range(start, end + 1):
            ranks[order[position]] = (start + end) / 2
        start = end + 1
    return ranks


def _memory_verdicts(scored: Sequence[Scored]) -> dict[str, float | int | None]:
    """How well it is told which runs exceed the memory; rows of families without any are counted too."""
    failed = [row for row in scored if row.truth.outcome == "oom"]
    passed = [row for row in scored if row.truth.outcome == "ok"]
    caught = sum(not row.prediction.fits for row in failed)
    alarms = sum(not row.prediction.fits for row in passed)
    total = len(failed) + len(passed)
    return {
        "oom_rows": len(failed),
        "oom_recall": caught / len(failed) if failed else None,
        "oom_false_alarms": alarms / len(passed) if passed else None,
        "oom_accuracy": (caught + len(passed) - alarms) / total if total else None,
    }
