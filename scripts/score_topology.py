#!/usr/bin/env python3
"""Score the topology readers on a folder of samples with known answers.

The folder holds ``samples.csv`` (columns file, kind, what_is_right: one line of JSON) and the files.
Every file goes to the readers as bytes: neither its name nor its kind is told to them. Every field of
the answer is compared with ``facts``; ``flags`` and ``note`` are remarks and are not compared.
"""

from __future__ import annotations

import argparse
import csv
import json
import secrets
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hpjob.core.errors import HpjobError
from hpjob.topology.read.recognise import read_bytes

COMMON_KINDS = (
    "nvsmi_topo", "nvsmi_p2p", "nvsmi_list", "nvlink", "fabric", "rocm", "slurm", "ibnetdiscover", "ibnetdiscover_p",
    "ibstat", "ibdev2netdev", "nccl_xml", "cloud",
)  # fmt: skip
REMARKS = ("flags", "note")


@dataclass
class Score:
    """Result of one sample."""

    file: str
    kind: str
    wrong: list[str] = field(default_factory=list)


def compare(answer: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """Return one line per field that differs; a field that the answer leaves out must be left out too."""
    lines: list[str] = []
    for name in [*answer, *(name for name in facts if name not in answer)]:
        if name in REMARKS:
            continue
        if name not in facts:
            lines.append(f"{name}: missing, expected {_short(answer[name])}")
        elif name not in answer:
            lines.append(f"{name}: found {_short(facts[name])}, expected no such field")
        elif answer[name] != facts[name] or isinstance(answer[name], bool) != isinstance(facts[name], bool):
            lines.append(f"{name}: found {_short(facts[name])}, expected {_short(answer[name])}")
    return lines


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 160 else text[:157] + "..."


def score_file(path: Path, row: dict[str, str]) -> Score:
    """Read one file and compare it with its answer."""
    score = Score(row["file"], row["kind"])
    try:
        reading = read_bytes(path.read_bytes())
    except HpjobError as error:
        score.wrong.append(f"not read: {error.message}")
        return score
    except Exception:
        score.wrong.append(f"crashed: {traceback.format_exc(limit=1).splitlines()[-1]}")
        return score
    if reading.kind != row["kind"]:
        score.wrong.append(f"kind: found {reading.kind}, expected {row['kind']}")
    facts = json.loads(json.dumps(reading.facts))
    score.wrong.extend(compare(json.loads(row["what_is_right"]), facts))
    return score


def score_folder(folder: Path, random_names: bool) -> list[Score]:
    """Score all samples, in place or as copies under random names."""
    csv.field_size_limit(sys.maxsize)
    with (folder / "samples.csv").open(newline="", encoding="utf-8") as handle:
        rows = list(csv.DictReader(handle))
    if not random_names:
        return [score_file(folder / row["file"], row) for row in rows]
    secrets.SystemRandom().shuffle(rows)
    with tempfile.TemporaryDirectory() as copies:
        scores = []
        for row in rows:
            copy = Path(copies) / secrets.token_hex(8)
            shutil.copyfile(folder / row["file"], copy)
            scores.append(score_file(copy, row))
    return sorted(scores, key=lambda score: score.file)


def report(scores: list[Score]) -> int:
    """Print every wrong field, the sum and the table; return the exit code."""
    for score in scores:
        for line in score.wrong:
            print(f"{score.file}: {line}")
    total: Counter[str] = Counter(score.kind for score in scores)
    right: Counter[str] = Counter(score.kind for score in scores if not score.wrong)
    print(f"{sum(right.values())} of {len(scores)} samples right")
    width = max((len(kind) for kind in total), default=4)
    for kind in sorted(total, key=lambda kind: (kind not in COMMON_KINDS, kind)):
        mark = "" if kind in COMMON_KINDS else "  (rare)"
        print(f"{kind:{width}}  {right[kind]:4d} of {total[kind]:4d}{mark}")
    return int(any(right[kind] != total[kind] for kind in total if kind in COMMON_KINDS))


def main() -> int:
    """Parse the command line and score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with samples.csv")
    parser.add_argument("--random-names", action="store_true", help="score copies under random names, in random order")
    arguments = parser.parse_args()
    if not (arguments.folder / "samples.csv").is_file():
        parser.error(f"{arguments.folder} holds no samples.csv")
    return report(score_folder(arguments.folder, arguments.random_names))


if __name__ == "__main__":
    sys.exit(main())
