"""Pipeline schedules with stages that sleep: does a measured step take as long as the simulation says?

Every stage sleeps for its forward and backward times where a model would compute; schedule, executor, messages
and process groups are the runtime's own. Sleeping needs no core, so pipelines of four ranks can be timed on a host
with two. Run it on a host that has nothing else to do::

    python -m benchmarks.sleeping_stages --out benchmarks/results/sleeping_stages.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpjob.plan.model import Axis
from hpjob.plan.schedule import makespan
from hpjob.plan.stage_times import StageTimes
from hpjob.runtime.mesh import build_mesh
from hpjob.runtime.model.stage import stage_parts
from hpjob.runtime.parallel.data import GradientSync
from hpjob.runtime.parity.case import Case, parse_case
from hpjob.runtime.pipeline.executor import Microbatch, PipelineExecutor
from hpjob.runtime.pipeline.schedule import build_schedule
from hpjob.runtime.pipeline.transport import Transport
from hpjob.runtime.process_pool import ProcessPool
from hpjob.runtime.weight_gradients import WeightGradientQueue

RANK_S = 0.3
"""Seconds a rank takes for each of forward, input gradients and weight gradients of one microbatch."""
MICROBATCHES = 8
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zbv", 2))
TOLERANCE = 0.05


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float, queue: WeightGradientQueue | None) -> Tensor:
        ctx.seconds, ctx.queue = seconds, queue
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        seconds: float = ctx.seconds

        def weight_gradients() -> tuple[Tensor, ...]:
            time.sleep(seconds)
            return ()

        time.sleep(seconds)
        if ctx.queue is None:
            weight_gradients()
        else:
            ctx.queue.defer_for([])([], weight_gradients)
        return gradients[0], None, None


class SleepingStage(nn.Module):
    """Takes the time of a stage and computes nothing."""

    def __init__(self, part: Any, seconds: float, queue: WeightGradientQueue | None) -> None:
        super().__init__()
        self.part, self.seconds, self.queue = part, seconds, queue

    def forward(self, inputs: Tensor, *_: Any) -> Tensor:
        hidden = torch.zeros(1, 1, 1, requires_grad=True) if self.part.is_first else inputs
        slept: Tensor = _Sleep.apply(hidden, self.seconds, self.queue)
        return slept

    def loss_sum(self, hidden: Tensor, _: Tensor) -> Tensor:
        return hidden.sum()


def timed_steps(case: Case, steps: int) -> list[float]:
    """Return the seconds of every step on this rank; all ranks begin together."""
    mesh = build_mesh(case.plan, "cpu")
    pipeline = case.plan.pipeline
    schedule = build_schedule(pipeline, case.plan.degrees.pp)
    parts = stage_parts(pipeline.layers_per_stage)
    rank = mesh.coordinate(Axis.PP)
    stages: dict[int, Any] = {}
    for number in schedule.stages_of(rank):
        queue = WeightGradientQueue() if schedule.defers_weights else None
        stage = SleepingStage(parts[number], RANK_S / pipeline.num_model_chunks, queue)
        stages[number] = (stage, GradientSync(stage, case.plan), queue)
    transport = Transport(schedule, mesh, shape=(1, 1, 1), dtype=torch.float32, device=torch.device("cpu"))
    executor = PipelineExecutor(schedule, rank, stages, transport)
    token = torch.zeros(1, 1, dtype=torch.int64)
    microbatches = [Microbatch(token, token, token)] * pipeline.num_microbatches
    times = []
    for _ in range(steps):
        dist.barrier()
        started = time.perf_counter()
        executor.run(microbatches, torch.ones(()))
        times.append(time.perf_counter() - started)
    return times


def compare(run: Callable[..., list[list[float]]], style: str, chunks: int, pp: int, steps: int) -> dict[str, Any]:
    """Time one schedule and return it beside the simulation."""
    text = f"pp_size={pp} pp_style={style} num_model_chunks={chunks} num_microbatches={MICROBATCHES}"
    case = parse_case(f"num_hidden_layers={pp * chunks} {text}", world=None, steps=1)
    seconds = (RANK_S / chunks,) * (pp * chunks)
    simulated = makespan(style, pp, chunks, MICROBATCHES, StageTimes(seconds, seconds, seconds), 0.0)
    # The first step also connects the ranks.
    measured = median(max(ranks) for ranks in list(zip(*run(timed_steps, case, steps + 1, world=pp), strict=True))[1:])
    ratio = measured / simulated
    return {
        "schedule": style,
        "chunks": chunks,
        "pp": pp,
        "microbatches": MICROBATCHES,
        "simulated_s": round(simulated, 4),
        "measured_s": round(measured, 4),
        "ratio": round(ratio, 4),
        "ok": abs(ratio - 1.0) <= TOLERANCE,
    }


def main() -> int:
    """Time all schedules; exit code 1 unless each is within the tolerance."""
    from benchmarks.sleeping_stages import compare as compare_by_name  # what workers import

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each schedule (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    rows = []
    with ProcessPool(4) as pool:
        for pp in (2, 4):
            for style, chunks in SCHEDULES:
                rows.append(compare_by_name(pool.run, style, chunks, pp, options.steps))
                print(json.dumps(rows[-1]), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({"rank_s": RANK_S, "tolerance": TOLERANCE, "rows": rows}, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
