"""What a list of parity cases covers: values of the parameters of a layout, and pairs of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path

import yaml

from hpjob.runtime.parity.case import Case, parse_case

FOLDER = Path(__file__).parent
SMALL = "num_hidden_layers=4 hidden_size=32 intermediate_size=48 vocab_size=96 seq_length=16"
"""The model of the cases in ci.yaml."""
Value = tuple[str, object]


def lines_of(name: str) -> list[str]:
    """The cases of a grid file."""
    lines: list[str] = yaml.safe_load((FOLDER / name).read_text())["cases"]
    return lines


def traits(case: Case) -> Mapping[str, object]:
    """The value of every parameter that the grid varies."""
    plan, shape, degrees = case.plan, case.recipe.model, case.plan.degrees
    parts = 2 * degrees.sp if plan.sequence_parallelism_mode == "ring_attn" else max(degrees.sp, degrees.tp)
    return {
        "family": shape.model_type,
        "tp": degrees.tp,
        "pp": degrees.pp,
        "data": "alone" if degrees.dp == 1 else "several",
        "sequence": plan.sequence_parallelism_mode,
        "ep": degrees.ep,
        "zero": plan.zero_stage,
        "schedule": plan.pipeline.style if degrees.pp > 1 else None,
        "recompute": plan.recompute,
        "precision": plan.precision,
        "tied": shape.tie_word_embeddings,
        "kv heads": "shared" if shape.num_key_value_heads < degrees.tp else "cut",
        "vocabulary": "odd" if shape.vocab_size % 2 else "even",
        "padding": plan.sequence_parallelism_mode is not None and plan.seq_length % parts > 0,
        "accumulates": plan.pipeline.num_microbatches > degrees.pp,
        "documents": case.documents > 1,
    }


def values_and_pairs(cases: Iterable[Case]) -> tuple[set[Value], set[tuple[Value, Value]]]:
    """All values that occur, and all pairs of values that meet in one case."""
    values: set[Value] = set()
    pairs: set[tuple[Value, Value]] = set()
    for case in cases:
        found = list(traits(case).items())
        values.update(found)
        pairs.update(combinations(found, 2))
    return values, pairs


def parsed(lines: Iterable[str]) -> list[Case]:
    """Cases with as many ranks as they name."""
    return [parse_case(line, world=None, steps=1) for line in lines]
