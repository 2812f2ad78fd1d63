"""Measuring whole models: order, budget, failures, and what is written down."""

from __future__ import annotations

import argparse
import json
import os
import time
from math import inf
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmarks need the [train] extra")
pytest.importorskip("transformers", reason="the benchmarks need the [train] extra")

import torch.distributed as dist

from benchmarks import multi_gpu
from benchmarks.gpu_parity import moe
from benchmarks.layouts import expert_parallel
from benchmarks.multi_gpu_models import models, regret
from benchmarks.tables import multi_gpu_table
from hpjob.runtime.parity.case import Case, parse_case
from hpjob.runtime.process_pool import ProcessPool, WorkerError
from hpjob.runtime.rehearsal.fake_world import fake_world
from hpjob.runtime.support import unsupported

GIB = 100.0


def options(*words: str) -> argparse.Namespace:
    return multi_gpu._options(["--device", "cpu", "--parts", "models", *words])


class PretendedPool:
    """Ranks that take what the planner predicts, and fail where they are told to."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.limits: list[float] = []

    def run(self, _: Any, case: Case, warm_up: int, steps: int, *, world: int, timeout_s: float) -> list[Any]:
        self.limits.append(timeout_s)
        assert warm_up and steps
        if self.failing and self.failing in case.text:
            raise WorkerError(1, "torch.OutOfMemoryError: CUDA out of memory")
        rank = {"step_s": [2.0] * steps, "first_step_s": 3.0, "build_s": 1.0, "loss": 10.0}
        return [rank | {"peak_allocated_gib": GIB, "peak_reserved_gib": GIB} for _ in range(world)]


def found(pool: PretendedPool, *words: str, seconds: float = inf) -> dict[str, list[dict[str, Any]]]:
    record: dict[str, list[dict[str, Any]]] = {}
    for key, row in models(pool, options(*words), time.monotonic() + seconds):  # type: ignore[arg-type]
        record.setdefault(key, []).append(row)
    return record


def test_speed_memory_and_errors_of_predictions_are_written_down() -> None:
    record = found(PretendedPool(), "--gpus", "8", "--share", "0.25")
    first = record["models"][0]
    assert first["layout"] == "planner's choice" and first["whole_batch"] == 288
    assert first["sequences"] == round(288 * first["share"])
    assert first["tokens_per_s_per_gpu"] == first["sequences"] * 4096 / 8 / 2.0
    assert first["samples_per_s"] == first["sequences"] / 2.0
    assert first["predicted_error"] == first["predicted_s"] / 2.0 - 1
    assert first["predicted_memory_error"] == first["predicted_gib"] / GIB - 1
    assert {row["work"] for row in record["regret"]} == {row["work"] for row in record["models"]}
    table = multi_gpu_table(record)
    assert "| Llama-2-7B, 4,096 | planner's choice (" in table and "loses" in table


def test_one_that_fails_does_not_stop_the_others() -> None:
    record = found(PretendedPool("pp_style=zbv"), "--gpus", "4", "--cases", "Llama-2-7B, 4,096")
    failed = [row for row in record["models"] if "failed" in row]
    # A runner-up may have the same schedule, or be a layout that is there already.
    assert failed == [row for row in record["models"] if "zbv" in row.get("plan", "")]
    assert "pp 4 zbv" in [row["layout"] for row in failed] and all("out of memory" in row["failed"] for row in failed)
    assert record["models"].index(failed[0]) < len(record["models"]) - 1
    assert [row for row in record["models"] if "median_step_s" in row]
    assert record["models_left_out"] == [{"needs more GPUs": ["tp 4 pp 2 interleaved"]}]
    assert "out of memory" in multi_gpu_table(record)


def test_nothing_is_started_that_would_end_after_the_budget() -> None:
    pool = PretendedPool()
    record = found(pool, "--gpus", "8", "--device", "cuda", seconds=60.0)
    assert pool.limits and len(pool.limits) < len(record["models"])
    assert all("skipped" in row for row in record["models"] if row.get("predicted_s", 0.0) > 60.0)
    assert found(PretendedPool(), "--gpus", "8", seconds=-1.0).keys() == {"models"}


def test_a_layout_is_measured_once_and_cases_pick() -> None:
    pool = PretendedPool()
    record = found(pool, "--gpus", "2", "--tiny", "--cases", "toy, 32: ")
    twins = [row for row in record["models"] if "same_as" in row]
    assert len(pool.limits) == len([row for row in record["models"] if "median_step_s" in row])
    assert all(row["work"] == "toy, 32" for row in record["models"])
    assert all(row["same_as"] in {other["layout"] for other in record["models"]} for row in twins)


def test_regret_is_what_the_best_gains_over_the_choice() -> None:
    assert regret({"planner's choice": 100.0, "other": 103.0}) == {
        "best": "other",
        "regret": pytest.approx(0.03),
        "tried": 2,
    }
    assert regret({"other": 103.0})["regret"] is None


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_the_small_mixture_has_an_expert_for_every_gpu(gpus: int) -> None:
    for text in expert_parallel(gpus).values():
        case = parse_case(f"{text} {moe(gpus)}", world=gpus, steps=1, model_type="mixtral")
        assert unsupported(case.plan, case.recipe) == []


class Alone:
    """The last rank of a world that has no others."""

    def run(self, measure: Any, case: Case, warm_up: int, steps: int, *, world: int, timeout_s: float) -> list[Any]:
        assert timeout_s > 0
        with fake_world(world - 1, world):
            return [measure(case, warm_up, steps)]


def test_every_target_can_be_built_and_trained() -> None:
    wanted = options("--gpus", "2", "--tiny", "--steps", "1", "--share", "0.5")
    rows = [row for key, row in models(Alone(), wanted, inf) if key == "models"]  # type: ignore[arg-type]
    for row in rows:
        assert "same_as" in row or "refused" in row or row["median_step_s"] > 0
    plans = " | ".join(row.get("plan", "") for row in rows)
    for part in ("zbv", "ring_attn", "tp 2", "ep 2", "zero 2"):
        assert part in plans


def dies_in_a_pipeline(case: Case, warm_up: int, steps: int) -> dict[str, Any]:
    if case.plan.degrees.pp > 1 and dist.get_rank() == 1:
        os._exit(9)
    dist.barrier()
    return {"step_s": [1.0] * steps, "first_step_s": 1.0, "build_s": float(warm_up), "loss": 1.0}


@pytest.mark.distributed
def test_a_rank_that_is_killed_costs_its_layout_alone() -> None:
    wanted = options("--gpus", "2", "--tiny", "--cases", "pp 2 zbv", "zero 2 dp 2", "--patience-s", "60")
    with ProcessPool(2, timeout_s=60) as pool:
        rows = [row for key, row in models(pool, wanted, inf, dies_in_a_pipeline) if key == "models"]
    outcomes = {(row["work"], row["layout"]): row for row in rows}
    assert "ended with code 9" in outcomes["toy, 32", "pp 2 zbv"]["failed"]
    assert outcomes["toy, 16", "zero 2 dp 2"]["tokens_per_s_per_gpu"] == 8 * 16 / 2
    assert "ended with code 9" in outcomes["toy, 16", "pp 2 zbv"]["failed"]


@pytest.mark.distributed
def test_the_file_has_every_result_as_soon_as_it_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpus", "2", "--device", "cpu", "--tiny", "--parts", "models", "small", "--steps", "1"]
    words += ["--parity-steps", "1", "--precisions", "fp32"]
    cases = ["--cases", "toy, 64: sp 2 ring_attn", "--out", str(tmp_path)]
    assert multi_gpu.main([*words, *cases]) == 0
    record = json.loads((tmp_path / "multi_gpu-2.json").read_text())
    (measured,), (small,) = record["models"], record["small"][:1]
    assert measured["median_step_s"] > 0 and measured["seq"] == 64
    assert small["ok"] and small["precision"] == "fp32"
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert list(shown[0]) == ["models_left_out"]
    assert multi_gpu.main(["--table", str(tmp_path / "multi_gpu-2.json")]) == 0
    assert "sp 2 ring_attn" in capsys.readouterr().out
