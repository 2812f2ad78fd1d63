#!/usr/bin/env python3
"""Scores the planner's memory and time model against a table of published runs.

scripts/score_planner.py runs.csv                         with the packaged corrections
scripts/score_planner.py runs.csv --leave-one-family-out  refitted without the family that is scored
scripts/score_planner.py runs.csv --fit                   refits the packaged corrections
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from importlib.resources import files
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hpjob.core import yaml_text
from hpjob.plan.constants import CALIBRATION_NAMES, Calibration
from hpjob.plan.published import score


def main() -> int:
    """Read the table, predict it, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="CSV with one row a run")
    parser.add_argument("--json", action="store_true", help="print one JSON document; errors are fractions")
    parser.add_argument("--leave-one-family-out", action="store_true", help="refit without the family scored")
    parser.add_argument("--fit", action="store_true", help="refit on all families and write calibration.yaml")
    options = parser.parse_args()
    if not options.table.is_file():
        parser.error(f"no such table: {options.table}")
    with options.table.open(encoding="utf-8-sig", newline="") as file:
        table = score.read_table(list(csv.DictReader(file)))
    fits: dict[str, Calibration] | None = None
    if options.fit or options.leave_one_family_out:
        fitter = score.fitter_of(table)
        families = sorted({case.family for case, _ in table.cases})
        fits = {family: fitter.fit(without=family) for family in families}
        if options.fit:
            held_out = score.report(score.predict_table(table, fits), table.skipped)["macro_mape_time"]
            fitted = fitter.fit()
            _write(fitted, held_out)
            if not options.leave_one_family_out:
                fits = dict.fromkeys(families, fitted)
    figures = score.report(score.predict_table(table, fits), table.skipped)
    print(json.dumps(figures, indent=2) if options.json else _text(figures))
    return 0


def _write(fitted: Calibration, held_out: float) -> None:
    path = Path(str(files("hpjob.plan") / "data" / "calibration.yaml"))
    comments = "".join(line + "\n" for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    values = {name: round(getattr(fitted, name), 4) for name in CALIBRATION_NAMES}
    path.write_text(
        comments + yaml_text.dump({"version": 1, "held_out_mape": round(held_out, 3), "fitted": values}),
        encoding="utf-8",
    )


def _text(figures: dict) -> str:
    lines = [f"{'family':<22}{'rows':>6}{'time MAPE':>11}{'bias':>8}{'rows':>6}{'memory MAPE':>13}"]
    for name, f in figures["families"].items():
        lines.append(
            f"{name:<22}{f['rows_time']:>6}{_percent(f['mape_time']):>11}{_percent(f['bias_time'], '+'):>8}"
            f"{f['rows_memory']:>6}{_percent(f['mape_memory']):>13}"
        )
    lines += [
        "",
        f"macro time MAPE {_percent(figures['macro_mape_time'])}, bias {_percent(figures['macro_bias_time'], '+')}; "
        f"memory MAPE {_percent(figures['mape_memory'])}",
        f"ranking over {figures['ranking_groups']} groups: regret {_percent(figures['regret'])}, "
        f"Spearman {_plain(figures['spearman'])}",
        f"out of memory: recall {_percent(figures['oom_recall'])} of {figures['oom_rows']}, "
        f"false alarms {_percent(figures['oom_false_alarms'])}, accuracy {_percent(figures['oom_accuracy'])}",
        "",
        "not scored:",
    ]
    for reason, ids in figures["skipped"].items():
        lines.append(f"  {len(ids):>4}  {reason}: {', '.join(ids[:4])}{', …' if len(ids) > 4 else ''}")
    lines += ["", "what was set with which rows in view:", *(f"  {sentence}" for sentence in figures["seen"])]
    return "\n".join(lines)


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{100 * value:{sign}.1f} %"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
