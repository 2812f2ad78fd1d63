"""A rehearsal as plain text: what was predicted beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from hpjob.plan.model import Plan
from hpjob.plan.rehearsal import RankRehearsal
from hpjob.plan.rehearsed_step import rehearsed_step


def memory_error(plan: Plan, report: RankRehearsal) -> float:
    """Return predicted over measured, less one, for what tensors hold at the peak."""
    return tensors_gib(plan, report.pp_rank) / report.peak_gib - 1.0


def tensors_gib(plan: Plan, pp_rank: int) -> float:
    """Return the predicted memory of tensors: without context, communicators and fragmentation."""
    entry = plan.memory[pp_rank]
    return entry.total_gib - entry.workspace_gib


def render_rehearsal(plan: Plan, reports: Sequence[RankRehearsal]) -> str:
    """Return a table of memory, a table of times, and the step."""
    lines = [f"{plan.recipe}: {plan.summary}", f"  rehearsed on {reports[0].device}, without peers", ""]
    lines += [*_memory(plan, reports), "", *_times(reports), "", *_step(plan, reports)]
    return "\n".join(lines)


def _memory(plan: Plan, reports: Sequence[RankRehearsal]) -> list[str]:
    rows = [f"  {'memory':<14}{'predicted':>12}{'rehearsed':>12}{'error':>8}   weights, optimizer, gradients, rest"]
    for report in reports:
        kinds = (report.weights_gib, report.optimizer_gib, report.gradients_gib, report.working_gib)
        rows.append(
            f"  {f'rank {report.rank}':<14}{_size(tensors_gib(plan, report.pp_rank)):>12}{_size(report.peak_gib):>12}"
            f"{memory_error(plan, report):>+8.1%}   {'  '.join(_size(kind) for kind in kinds)}"
        )
    return rows


def _times(reports: Sequence[RankRehearsal]) -> list[str]:
    rows = [f"  {'a microbatch':<14}{'layers':>10}{'forward':>10}{'backward':>10}{'weights':>10}"]
    for report in reports:
        for timing in report.stages:
            weight = "" if timing.weight_s is None else _seconds(timing.weight_s)
            rows.append(
                f"  {f'stage {timing.stage}':<14}{timing.num_layers:>10}{_seconds(timing.forward_s):>10}"
                f"{_seconds(timing.backward_s):>10}{weight:>10}"
            )
    return rows


def _step(plan: Plan, reports: Sequence[RankRehearsal]) -> list[str]:
    found = rehearsed_step(plan, reports)
    if found is None:
        return ["  step time needs every stage: rehearse with --all-stages"]
    tokens = plan.global_batch_size * plan.seq_length / found.step_s
    lines = [
        f"  step {_seconds(found.step_s)} ({_seconds(found.low_s)} to {_seconds(found.high_s)}), "
        f"{tokens:,.0f} tokens/s; predicted without rehearsal {_seconds(plan.time.step_s)}",
        f"  {found.measured_share:.0%} of it is measured, the rest is communication by the planner's model",
    ]
    if found.host_bound and reports[0].device != "cpu":
        lines.append("  the host takes as long to hand out the work as the device to do it")
    return lines


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def _size(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 1 else f"{gib * 1024:.1f} MiB"
