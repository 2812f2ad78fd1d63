"""Why no plan exists, and what would help."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from hpjob.core.errors import HpjobError, NothingFitsError, UserInputError
from hpjob.plan.broken_rules import broken_rules
from hpjob.plan.nearest import LAYOUT_FIELDS, SHARDING_FIELDS, nearest_layouts
from hpjob.plan.offload import exceeds_host, host_gib, why_no_offload
from hpjob.plan.problem import Problem
from hpjob.plan.search import Candidate, fits_somehow
from hpjob.recipe.model import ParallelSettings

_OFFLOADED: dict[str, object] = {"cpu_offload": True}


def no_legal_layout(problem: Problem, recipe: str) -> HpjobError:
    """Return the error for fixed values that no legal layout keeps."""
    s = problem.settings
    fixed = [f"{name}={getattr(s, name)}" for name in ParallelSettings.model_fields if _is_fixed(s, name)]
    why = broken_rules(problem) or [
        f"global batch {problem.global_batch} does not spread evenly over any dp and microbatch size"
    ]
    nearby = nearest_layouts(problem)
    message = (
        f"recipe {recipe}: no legal layout for {problem.world_size} ranks with {', '.join(fixed) or 'these sizes'}"
    )
    lines = [message, *why]
    hint = "nearest legal layouts: " + "; ".join(nearby) if nearby else "change training.global_batch_size or --nodes"
    kind = UserInputError if fixed else NothingFitsError
    return kind("\n".join(lines), hint=hint)


def _is_fixed(s: ParallelSettings, name: str) -> bool:
    value = getattr(s, name)
    return (name in LAYOUT_FIELDS and value != "auto") or (
        name in SHARDING_FIELDS and value not in (None, False, "auto")
    )


def nothing_fits(problem: Problem, least: Candidate, limit_gib: float, recipe: str, num_nodes: int) -> NothingFitsError:
    """Return the error for a model that no legal layout brings into memory, with the smallest shortfall."""
    layout = least.layout
    ranks = [problem.runtime.rank_memory(layout, r) for r in range(layout.pp)]
    worst = max(ranks, key=lambda rank: rank.total_gib)
    where, unit = f"{num_nodes} x {problem.hardware.name}", problem.hardware.unit
    degrees = f"tp {layout.tp} · pp {layout.pp} · dp {layout.dp}, zero {layout.zero}, {layout.recompute} recompute"
    kinds = ("weights", "gradients", "optimizer", "activations", "logits", "workspace")
    parts = " + ".join(f"{kind} {getattr(worst, kind + '_gib'):.1f}" for kind in kinds)
    message = (
        f"recipe {recipe} does not fit on {where}: the smallest layout ({degrees}) "
        f"needs {least.memory_gib:.1f} GiB a {unit}, {limit_gib:.1f} are usable, "
        f"{ceil(10 * (least.memory_gib - limit_gib)) / 10:.1f} GiB are missing\n{parts} GiB"
    )
    if problem.settings.cpu_offload == "auto" and not problem.hardware.is_cpu:
        message += f"\n{why_no_offload(problem, num_nodes) or 'nor does anything fit with offloading'}"
    return NothingFitsError(message, hint="; or ".join(_what_helps(problem, limit_gib, num_nodes)))


def _what_helps(problem: Problem, limit_gib: float, num_nodes: int) -> list[str]:
    s = problem.settings
    found = []
    releases: tuple[tuple[str, dict[str, object]], ...] = (
        ("--set parallel.gradient_checkpoint_config.policy=full", {"gradient_checkpoint_config": _full(s)}),
        ("leave microbatch_size and num_microbatches auto", {"microbatch_size": "auto", "num_microbatches": "auto"}),
        ("leave zero_stage auto", {"zero_stage": "auto"}),
        ("leave tp_size and pp_size auto", {"tp_size": "auto", "pp_size": "auto"}),
    )
    everything = {name: "auto" for name in (*LAYOUT_FIELDS, "zero_stage") if getattr(s, name) != "auto"}
    if len(everything) > 1:
        releases += ((f"leave {', '.join(everything)} auto", everything | {"gradient_checkpoint_config": _full(s)}),)
    for words, update in releases:
        if any(getattr(s, name) != value for name, value in update.items()):
            changed = replace(problem, settings=s.model_copy(update=update))
            if fits_somehow(changed, limit_gib):
                found.append(words)
    may_offload = s.cpu_offload is False and exceeds_host(problem, num_nodes) is None
    if may_offload and fits_somehow(replace(problem, settings=s.model_copy(update=_OFFLOADED)), limit_gib):
        needed = host_gib(problem, num_nodes)
        found.append(f"leave cpu_offload auto (slower; takes about {needed:,.0f} GiB of a node's own memory)")
    if isinstance(s.num_microbatches, int) and s.microbatch_size == "auto":
        found += _smaller_batch(problem, s.num_microbatches, limit_gib)
    if more := _enough_nodes(problem, limit_gib, num_nodes):
        found.append(f"use --nodes {more}")
    return found or ["use GPUs with more memory, a smaller model or a shorter sequence"]


def _enough_nodes(problem: Problem, limit_gib: float, num_nodes: int) -> int | None:
    """Return about the smallest number of nodes that is enough."""
    per_node = problem.world_size // num_nodes

    def enough(count: int) -> bool:
        return fits_somehow(replace(problem, world_size=count * per_node), limit_gib)

    for factor in (2, 4, 8, 16, 32, 64):
        most = num_nodes * factor
        if enough(most):
            step = max(1, most // 8)
            return next((count for count in range(most // 2 + step, most, step) if enough(count)), most)
    return None


def _smaller_batch(problem: Problem, count: int, limit_gib: float) -> list[str]:
    """The largest global batch that fits with the fixed number of microbatches."""
    batch = problem.global_batch
    while batch % 2 == 0 and batch // 2 >= count:
        batch //= 2
        if fits_somehow(replace(problem, global_batch=batch), limit_gib):
            return [f"keep {count} microbatches with --set training.global_batch_size={batch}"]
    return []


def _full(s: ParallelSettings) -> object:
    return s.gradient_checkpoint_config.model_copy(update={"policy": "full", "every_kth_layer": 1})
