"""What the lists of parity cases cover."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the runtime's tests need the [train] extra")

from tests.runtime.engine.coverage import SMALL, lines_of, parsed, traits, values_and_pairs

GRID = parsed([*lines_of("grid.yaml"), *lines_of("pairwise.yaml")])


def test_every_test_run_meets_every_value_and_most_pairs() -> None:
    values, pairs = values_and_pairs(GRID)
    met_values, met_pairs = values_and_pairs(parsed(f"{SMALL} {line}" for line in lines_of("ci.yaml")))
    assert values - met_values == set()
    assert len(pairs & met_pairs) >= 0.88 * len(pairs)


def test_the_grid_has_all_values_in_worlds_up_to_eight() -> None:
    worlds = {case.world for case in GRID}
    assert {1, 2, 4, 8} <= worlds
    assert max(worlds) == 8
    wanted = {
        "sequence": {None, "split_gather", "ring", "all_to_all", "ring_attn"},
        "schedule": {None, "1f1b", "interleaved", "zbv"},
        "zero": {0, 1, 2, 3},
        "recompute": {"none", "selective", "full"},
        "precision": {"fp32", "bf16", "fp16"},
        "family": {"llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma", "mixtral", "qwen3_moe"},
    }
    for name, expected in wanted.items():
        assert {traits(case)[name] for case in GRID} == expected


def test_the_pairwise_list_has_at_least_sixty_cases() -> None:
    assert len(lines_of("pairwise.yaml")) >= 60
