"""The step time of a plan whose stages were measured and whose communication is still predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from hpjob.plan.constants import held_out_error
from hpjob.plan.model import Plan
from hpjob.plan.rehearsal import RankRehearsal, StageTiming
from hpjob.plan.schedule import makespan
from hpjob.plan.stage_times import StageTimes

_MEASURED_ERROR = 0.02
"""What repeated measurements of one stage differ by."""
_WIDTHS = 2.0


@dataclass(frozen=True, slots=True)
class RehearsedStep:
    """Seconds of one optimizer step, with an interval."""

    step_s: float
    low_s: float
    high_s: float
    measured_share: float
    """Part of the step that was measured; the rest is communication by the planner's model."""
    host_bound: bool
    """Handing the work to the device takes longer than the device takes for it."""


def rehearsed_step(plan: Plan, reports: Sequence[RankRehearsal]) -> RehearsedStep | None:
    """Put the stages' measured times through the schedule.

    Args:
        plan: Its communication times are taken as they are.
        reports: Of one rank of each pipeline position; others do no harm.

    Returns:
        None when a stage was not rehearsed.
    """
    timings = {timing.stage: timing for report in reports for timing in report.stages}
    num_stages = plan.degrees.pp * plan.pipeline.num_model_chunks
    if set(timings) != set(range(num_stages)):
        return None
    time, pipeline = plan.time, plan.pipeline
    comm = time.tp_comm_s / pipeline.num_microbatches / pipeline.num_model_chunks
    stages = [timings[stage] for stage in range(num_stages)]
    measured, span = _span(plan, stages, 0.0), _span(plan, stages, comm)
    own = measured + max(report.optimizer_s for report in reports)
    predicted = span - measured + time.pp_comm_s + time.dp_comm_s
    step = own + predicted
    width = _MEASURED_ERROR * own + _WIDTHS * held_out_error() * predicted
    return RehearsedStep(
        step_s=step,
        low_s=step - width,
        high_s=step + width,
        measured_share=own / step,
        host_bound=any(report.host_s > _device_s(report) for report in reports),
    )


def _span(plan: Plan, stages: Sequence[StageTiming], comm: float) -> float:
    """Seconds from the first forward to the last backward, with a stage's share of communication in its passes."""
    pipeline = plan.pipeline
    times = StageTimes(
        [t.forward_s + comm / 3 for t in stages],
        [t.backward_s + comm * 2 / 3 for t in stages],
        [t.weight_s or 0.0 for t in stages],
    )
    pp, chunks, count = plan.degrees.pp, pipeline.num_model_chunks, pipeline.num_microbatches
    return makespan(pipeline.style, pp, chunks, count, times, hops=0.0)


def _device_s(report: RankRehearsal) -> float:
    passes = fsum(t.forward_s + t.backward_s + (t.weight_s or 0.0) for t in report.stages)
    return report.num_microbatches * passes + report.optimizer_s
