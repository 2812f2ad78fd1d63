"""Runs a few steps of one rank and reports its memory and times."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hpjob.plan.model import Axis, Plan
from hpjob.plan.rehearsal import RankRehearsal, StageTiming
from hpjob.recipe.model import Recipe
from hpjob.runtime.engine import Batch
from hpjob.runtime.mesh import build_mesh
from hpjob.runtime.rehearsal.fake_world import fake_world
from hpjob.runtime.rehearsal.memory import GIB, Peak, held_bytes, watched_peak
from hpjob.runtime.rehearsal.timed_engine import Stopwatch, TimedEngine, stage_seconds

_WARM_UP_STEPS = 2
"""The first compiles and makes what stays; on a GPU the second still fills the allocator's cache."""


def rehearse_rank(plan: Plan, recipe: Recipe, rank: int, device: torch.device, *, steps: int = 3) -> RankRehearsal:
    """Be one rank of a plan for a few steps, alone.

    Args:
        plan: The layout, of any number of ranks.
        recipe: Of the same model.
        rank: Which one to be.
        device: To run on.
        steps: Measured ones, after two that warm up.

    Raises:
        UserInputError: The runtime cannot run this plan.
        torch.OutOfMemoryError: This rank does not fit on the device.
    """
    with fake_world(rank, plan.degrees.world_size):
        rehearsal = _Rehearsal(_shortened(plan), recipe, device)
        rehearsal.warm_up()
        host_s, medians = rehearsal.time(steps)
        peak, gradient_bytes = rehearsal.weigh()
        engine = rehearsal.engine
        return RankRehearsal(
            plan_summary=plan.summary,
            rank=rank,
            pp_rank=rehearsal.pp_rank,
            world_size=plan.degrees.world_size,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            weights_gib=held_bytes(_weights(engine)) / GIB,
            gradients_gib=gradient_bytes / GIB,
            optimizer_gib=held_bytes(engine.optimizer.moments()) / GIB,
            peak_gib=peak.bytes / GIB,
            reserved_gib=None if peak.reserved_bytes is None else peak.reserved_bytes / GIB,
            stages=tuple(_timing(medians, stage.part.index, len(stage.decoder_layers)) for stage in engine.stages),
            optimizer_s=medians[_OPTIMIZER],
            host_s=host_s,
            num_microbatches=rehearsal.plan.pipeline.num_microbatches,
        )


_OPTIMIZER = "optimizer"


class _Rehearsal:
    """One engine and the batch that it repeats."""

    def __init__(self, plan: Plan, recipe: Recipe, device: torch.device) -> None:
        mesh = build_mesh(plan, device.type)
        self.plan = plan
        self.pp_rank = mesh.coordinate(Axis.PP)
        self.engine = TimedEngine(plan, recipe, mesh, device)
        self._device = device
        self._watch = Stopwatch(device)
        self.engine.times(self._watch)
        self._batch = _noise(plan, recipe, device)
        self._steps = 0

    def warm_up(self) -> None:
        """Compile and allocate what later steps reuse."""
        for _ in range(_WARM_UP_STEPS):
            self._step()
        self._wait()
        self._watch.medians()

    def time(self, steps: int) -> tuple[float, dict[Any, float]]:
        """Return host seconds of a step, and the device's seconds by action."""
        host = []
        for _ in range(steps):
            started = time.perf_counter()
            self._step()
            host.append(time.perf_counter() - started)
            self._wait()
        return median(host), self._watch.medians()

    def weigh(self) -> tuple[Peak, int]:
        """Return the peak of one step and the bytes of its gradients."""
        self._clear()
        with watched_peak(self._device, held_bytes(self._held())) as peak:
            self._step()
        gradients = held_bytes(item.local_gradient for item in self.engine.parameters)
        self._watch.medians()
        return peak, gradients

    def _step(self) -> None:
        loss, tokens = self.engine.accumulate_gradients(self._batch)
        self._steps += 1
        with self._watch.measure(_OPTIMIZER):
            self.engine.apply_gradients(loss, tokens, self._steps)

    def _clear(self) -> None:
        for item in self.engine.parameters:
            item.clear_gradient()

    def _held(self) -> list[Tensor]:
        batch = self._batch
        return [*_weights(self.engine), *self.engine.optimizer.moments(), batch.input_ids, batch.labels]

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _weights(engine: TimedEngine) -> list[Tensor]:
    """Weights that are computed with, or the chunks of those that are whole only at times, and fp32 masters."""
    found = [t for item in engine.parameters for t in (item.local, item.compute_weight)]
    found += [item.parameter.detach() for item in engine.parameters if item.chunk is None or item.chunk.kept is None]
    return [tensor for tensor in found if tensor is not None]


def _shortened(plan: Plan) -> Plan:
    """Fewer microbatches where a plan has many: the most that are in flight at once and as many again."""
    pipeline, degrees = plan.pipeline, plan.degrees
    enough = (2 if pipeline.style == "1f1b" else 4) * max(2, degrees.pp)
    if pipeline.num_microbatches <= enough:
        return plan
    fewer = pipeline.model_copy(update={"num_microbatches": enough})
    batch = degrees.dp * enough * pipeline.microbatch_size
    return plan.model_copy(update={"pipeline": fewer, "global_batch_size": batch})


def _noise(plan: Plan, recipe: Recipe, device: torch.device) -> Batch:
    shape = (plan.pipeline.num_microbatches * plan.pipeline.microbatch_size, plan.seq_length)
    tokens = torch.randint(recipe.model.vocab_size, (shape[0], shape[1] + 1), device=device)
    positions = torch.arange(shape[1], device=device).expand(shape)
    return Batch(input_ids=tokens[:, :-1], labels=tokens[:, 1:], position_ids=positions)


def _timing(medians: dict[Any, float], stage: int, num_layers: int) -> StageTiming:
    forward, backward, weight = stage_seconds(medians, stage)
    return StageTiming(stage=stage, num_layers=num_layers, forward_s=forward, backward_s=backward, weight_s=weight)
