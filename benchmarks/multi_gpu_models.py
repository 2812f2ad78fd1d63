"""Whole models on all GPUs of a host: the planner's choice beside its runners-up and layouts given by hand."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from benchmarks.big_models import CHOICE, WHOLE, Chosen, Planner, Target, left_out, parity_text, targets
from benchmarks.gpu_parity import parity
from benchmarks.measure import measure_layout
from benchmarks.multi_gpu_speed import figures
from hpjob.core.errors import HpjobError
from hpjob.plan.layout import Layout
from hpjob.runtime.process_pool import ProcessPool, WorkerError
from hpjob.runtime.support import unsupported

SETUP_S = {"cuda": 25.0, "cpu": 5.0}
"""Building, compiling and connecting the ranks of a layout take about so long."""
_PATIENCE = 3.0
"""Times the expected seconds that a layout may take."""
_LONG_STEP_S = 5.0
_SMALL_LAYERS = 16
Measure = Callable[..., dict[str, Any]]


def models(
    pool: ProcessPool, options: argparse.Namespace, deadline: float, measure: Measure = measure_layout
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield one record a layout in the order of worth, under ``models``, then what the planner's choices lose.

    Args:
        pool: Of as many ranks as there are GPUs.
        options: Of the command line.
        deadline: Monotonic; nothing is started that would end later.
        measure: What each rank does.
    """
    planner = Planner(options.gpus, options.machine)
    wanted = _picked(targets(options.gpus, tiny=options.tiny, whole=options.share < 1), options.cases)
    if names := left_out(options.gpus):
        yield "models_left_out", {"needs more GPUs": names}
    measured: dict[tuple[str, Layout], str] = {}
    speeds: dict[str, dict[str, float]] = {}
    for target in wanted:
        record: dict[str, Any] = {"work": target.work.name, "layout": target.name}
        try:
            chosen = planner.choose(target, options.share)
        except HpjobError as error:
            yield "models", record | {"refused": [error.message]}
            continue
        twin = measured.get((target.work.name, chosen.layout))
        if twin is not None:
            yield "models", record | {"same_as": twin}
            continue
        record |= _described(target, chosen)
        expected_s = _expected_s(chosen, target, options)
        reasons = unsupported(chosen.case.plan, chosen.case.recipe)
        if reasons:
            yield "models", record | {"refused": reasons}
        elif time.monotonic() + expected_s > deadline:
            yield "models", record | {"skipped": f"out of time: it takes about {expected_s:.0f} s"}
        else:
            measured[target.work.name, chosen.layout] = target.name
            record |= _measured(pool, target, chosen, expected_s, options, measure)
            if "tokens_per_s_per_gpu" in record and not target.is_whole:
                speeds.setdefault(target.work.name, {})[target.name] = record["tokens_per_s_per_gpu"]
            yield "models", record
    for name, of_layouts in speeds.items():
        yield "regret", {"work": name, **regret(of_layouts)}


def small_models(pool: ProcessPool, options: argparse.Namespace, deadline: float) -> Iterator[dict[str, Any]]:
    """Yield the parity of every layout that :func:`models` measures, on a small model against one GPU."""
    planner = Planner(options.gpus, options.machine)
    texts: dict[str, str] = {}
    layers = _SMALL_LAYERS
    for target in _picked(targets(options.gpus, tiny=options.tiny, whole=False), options.cases):
        try:
            layout = planner.choose(target, 1.0).layout
        except HpjobError:
            continue
        if target.work.recipe.model.num_experts is None and parity_text(layout) not in texts.values():
            texts.setdefault(f"{target.work.name}: {target.name}", parity_text(layout))
            layers = max(layers, layout.pp * layout.chunks)
    extra = f"num_hidden_layers={layers}" + ("" if options.compile_parity else " enable_jit_fused=false")
    yield from parity(
        pool,
        options.gpus,
        texts,
        steps=options.parity_steps,
        extra=extra,
        precisions=options.precisions,
        deadline=deadline,
    )


def regret(speeds: Mapping[str, float]) -> dict[str, Any]:
    """Return by how much the best layout beats the planner's choice; 0 where the choice is the best one."""
    best = max(speeds, key=lambda name: speeds[name])
    if CHOICE not in speeds:
        return {"best": best, "regret": None, "tried": len(speeds)}
    return {"best": best, "regret": speeds[best] / speeds[CHOICE] - 1, "tried": len(speeds)}


def _picked(found: Sequence[Target], cases: Sequence[str] | None) -> list[Target]:
    """Keep those whose work and layout contain one of the texts."""
    return [t for t in found if not cases or any(text in f"{t.work.name}: {t.name}" for text in cases)]


def _described(target: Target, chosen: Chosen) -> dict[str, Any]:
    plan = chosen.case.plan
    return {
        "plan": plan.summary,
        "recompute": plan.recompute,
        "every_kth_layer": plan.recompute_every_kth_layer,
        "layers_per_stage": list(plan.pipeline.layers_per_stage),
        "seq": plan.seq_length,
        "whole_batch": target.work.recipe.training.global_batch_size,
        "sequences": plan.global_batch_size,
        "share": chosen.share,
        "predicted_s": chosen.predicted_s,
        "predicted_gib": chosen.predicted_gib,
    }


def _expected_s(chosen: Chosen, target: Target, options: argparse.Namespace) -> float:
    warm_up, steps = _counts(target, chosen, options)
    return SETUP_S[options.device] + (warm_up + steps) * chosen.predicted_s


def _counts(target: Target, chosen: Chosen, options: argparse.Namespace) -> tuple[int, int]:
    """Steps before the timed ones, and those; fewer where one step takes long."""
    is_long = target.name == WHOLE or chosen.predicted_s > _LONG_STEP_S
    return (1, min(2, options.steps)) if is_long else (2, options.steps)


def _measured(
    pool: ProcessPool,
    target: Target,
    chosen: Chosen,
    expected_s: float,
    options: argparse.Namespace,
    measure: Measure,
) -> dict[str, Any]:
    warm_up, steps = _counts(target, chosen, options)
    patience_s = max(options.patience_s, _PATIENCE * expected_s)
    began = time.monotonic()
    try:
        ranks = pool.run(measure, chosen.case, warm_up, steps, world=options.gpus, timeout_s=patience_s)
    except (WorkerError, HpjobError) as error:
        return {"failed": str(error)[-1500:], "took_s": time.monotonic() - began}
    found = figures(ranks, chosen.case)
    step_s = found["median_step_s"]
    peaks = [gib for gib in found["peak_reserved_gib"] if gib is not None]
    return {
        **found,
        "samples_per_s": chosen.case.plan.global_batch_size / step_s if step_s else inf,
        "predicted_error": chosen.predicted_s / step_s - 1,
        "predicted_memory_error": chosen.predicted_gib / max(peaks) - 1 if peaks else None,
        "took_s": time.monotonic() - began,
    }
