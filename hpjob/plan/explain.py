"""A plan as plain text for the terminal."""

from __future__ import annotations

from hpjob.plan.model import Change, MemoryEstimate, Plan
from hpjob.plan.replan import Replan

_WIDTH = 16


def render_plan(plan: Plan) -> str:
    """Return the plan, its memory and time by kind, the reasons and the runners-up."""
    lines = [_title(plan), "", *_axes(plan), ""]
    lines += _memory(plan)
    lines += _time(plan)
    lines += _listed("why", plan.reasons)
    lines += _listed("binds", [plan.binding] if plan.binding else [])
    lines += _listed("next best", [f"{r.summary}: {r.why_not}" for r in plan.runners_up])
    lines += _listed("one change", [_change(change) for change in plan.changes])
    lines += _listed(plan.basis, [plan.basis_note] if plan.basis_note else [])
    lines += _listed("warning", plan.warnings)
    return "\n".join(lines)


def render_replan(found: Replan) -> str:
    """Return the new plan below what changes against the old one."""
    old, new = found.previous, found.plan
    had = _seconds(found.old_step_s) if found.old_step_s else "not known"
    change = f" ({100 * (found.new_step_s / found.old_step_s - 1):+.0f} %)" if found.old_step_s else ""
    lines = [
        f"{new.recipe}: {old.num_nodes} x {old.gpus_per_node} ranks before, {new.num_nodes} x {new.gpus_per_node} now",
        f"  {'before':<{_WIDTH}}{old.summary}",
        f"  {'now':<{_WIDTH}}{new.summary}",
        f"  {'step time':<{_WIDTH}}{had} before, {_seconds(found.new_step_s)} now{change}",
        f"  {'batch':<{_WIDTH}}{new.global_batch_size} sequences of {new.seq_length} tokens in the same order",
        f"  {'checkpoint':<{_WIDTH}}loads: tensors are saved under global names and cut anew when they are read",
        *_listed("released", found.notes),
        "",
    ]
    return "\n".join(lines) + "\n" + render_plan(new)


def _title(plan: Plan) -> str:
    gpus = plan.num_nodes * plan.gpus_per_node
    unit = "ranks" if plan.machine == "cpu" else "GPUs"
    nodes = f"{plan.num_nodes} x {plan.machine} ({gpus} {unit}, {plan.gpus_per_node} a node)"
    return f"{plan.recipe} on {nodes}\n  {plan.summary}"


def _axes(plan: Plan) -> list[str]:
    d, per_node = plan.degrees, plan.gpus_per_node
    shards = f"ZeRO-{plan.zero_stage}" if plan.zero_stage else "full copies"
    shards += f" in groups of {plan.zero_shard_size}" if plan.zero_shard_size else ""
    shards += ", shards in the host's memory" if plan.cpu_offload else ""
    carries = {
        "pp": f"activations between {d.pp} stages of {_layer_counts(plan)} layers",
        "ep": "tokens to their experts, spread over ranks of dp and sp",
        "dp": f"gradients, {shards}",
        "sp": f"sequence, {plan.sequence_parallelism_mode}",
        "tp": "all-reduces of every layer" + (", sequence parallel" if plan.sequence_parallelism_mode else ""),
    }
    strides = {"tp": 1, "sp": d.tp, "ep": d.tp, "dp": d.tp * d.sp, "pp": d.tp * d.sp * d.dp}
    rows = [f"  {'axis':<6}{'degree':>8}  {'placed':<18}carries"]
    for axis in ("pp", "dp", "ep", "sp", "tp"):
        size = getattr(d, axis)
        if size > 1:
            placed = "inside a node" if size * strides[axis] <= per_node else "across nodes"
            rows.append(f"  {axis:<6}{size:>8}  {placed:<18}{carries[axis]}")
    if len(rows) == 1:
        rows.append(f"  {'none':<6}{1:>8}  one rank holds everything")
    return rows


def _layer_counts(plan: Plan) -> str:
    counts = sorted(set(plan.pipeline.layers_per_stage))
    chunks = f"{plan.pipeline.num_model_chunks} chunks of " if plan.pipeline.num_model_chunks > 1 else ""
    return chunks + (f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}")


def worst_rank(plan: Plan) -> MemoryEstimate:
    """Return the entry of the pipeline rank that needs most memory."""
    return max(plan.memory, key=lambda rank: rank.total_gib)


def _memory(plan: Plan) -> list[str]:
    w = worst_rank(plan)
    kinds = (
        f"weights {w.weights_gib:.1f}  gradients {w.gradients_gib:.1f}  optimizer {w.optimizer_gib:.1f}  "
        f"activations {w.activations_gib:.1f}  logits {w.logits_gib:.1f}  workspace {w.workspace_gib:.1f}"
    )
    stage = f" (stage {w.pp_rank})" if len(plan.memory) > 1 else ""
    return [
        f"  {'memory per GPU':<{_WIDTH}}{w.total_gib:.1f} of {plan.memory_limit_gib:.1f} GiB{stage}",
        f"  {'':<{_WIDTH}}{kinds}",
    ]


def _time(plan: Plan) -> list[str]:
    t, p = plan.time, plan.pipeline
    recompute = f", {_recompute(plan)}" if plan.recompute != "none" else ""
    # One figure has the traffic of all groups inside layers.
    inner = "+".join(axis for axis in ("tp", "sp", "ep") if getattr(plan.degrees, axis) > 1) or "tp"
    return [
        f"  {'global batch':<{_WIDTH}}{plan.global_batch_size} sequences of {plan.seq_length} tokens = "
        f"dp {plan.degrees.dp} x {p.num_microbatches} microbatches x {p.microbatch_size}{recompute}",
        f"  {'step time':<{_WIDTH}}{_seconds(t.step_s)} ({_seconds(t.low_s)} to {_seconds(t.high_s)}), "
        f"{t.tokens_per_s:,.0f} tokens/s",
        f"  {'':<{_WIDTH}}compute {_seconds(t.compute_s)}  bubble {_seconds(t.bubble_s)}  "
        f"{inner} {_seconds(t.tp_comm_s)}  "
        f"pp {_seconds(t.pp_comm_s)}  dp {_seconds(t.dp_comm_s)}  optimizer {_seconds(t.optimizer_s)}",
    ]


def _recompute(plan: Plan) -> str:
    if plan.recompute_layers_per_stage is not None:
        return f"{plan.recompute} recompute of {list(plan.recompute_layers_per_stage)} layers of the stages"
    k = plan.recompute_every_kth_layer
    return f"{plan.recompute} recompute" + (f" of one layer in {k}" if plan.recompute == "full" and k > 1 else "")


def _change(change: Change) -> str:
    if change.step_s is None or change.percent is None:
        return f"{change.change}: {change.summary}"
    words = f"{change.percent:+.1f} % step time ({_seconds(change.step_s)}, {change.memory_gib:.1f} GiB)"
    return f"{change.change}: {words}, {change.summary}"


def _seconds(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f} s"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def _listed(label: str, entries: tuple[str, ...] | list[str]) -> list[str]:
    return [f"  {label if index == 0 else '':<{_WIDTH}}{entry}" for index, entry in enumerate(entries)]
