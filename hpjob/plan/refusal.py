"""Why no plan exists, and what would help."""

from __future__ import annotations

from dataclasses import replace
from math import log2

from hpjob.core.errors import HpjobError, NothingFitsError, UserInputError
from hpjob.plan.enumeration import legal_bases
from hpjob.plan.layout import Layout
from hpjob.plan.legality import problems
from hpjob.plan.problem import Problem
from hpjob.plan.search import Candidate, fits_somehow
from hpjob.recipe.model import ParallelSettings

_DEGREES = ("tp_size", "pp_size", "sp_size")
_BATCHES = ("num_microbatches", "microbatch_size")
_LAYOUT_FIELDS = (*_DEGREES, *_BATCHES, "ep_size", "pp_style", "num_model_chunks", "sequence_parallelism_mode")
_SHARDING = ("zero_shard_size", "cpu_offload")


def no_legal_layout(problem: Problem, recipe: str) -> HpjobError:
    """Return the error for fixed values that no legal layout keeps."""
    s = problem.settings
    fixed = [f"{name}={getattr(s, name)}" for name in ParallelSettings.model_fields if _is_fixed(s, name)]
    why = _degree_reasons(problem) or _layout_reasons(problem)
    nearby = _nearest_layouts(problem)
    message = (
        f"recipe {recipe}: no legal layout for {problem.world_size} ranks with {', '.join(fixed) or 'these sizes'}"
    )
    lines = [message, *why]
    hint = "nearest legal layouts: " + "; ".join(nearby) if nearby else "change training.global_batch_size or --nodes"
    kind = UserInputError if fixed else NothingFitsError
    return kind("\n".join(lines), hint=hint)


def _is_fixed(s: ParallelSettings, name: str) -> bool:
    value = getattr(s, name)
    return (name in _LAYOUT_FIELDS and value != "auto") or (name in _SHARDING and value not in (None, False))


def _fixed_or(s: ParallelSettings, name: str, default: int) -> int:
    value = getattr(s, name)
    return value if isinstance(value, int) else default


def _degree_reasons(problem: Problem) -> list[str]:
    s, world = problem.settings, problem.world_size
    tp, pp, sp = (_fixed_or(s, name, 1) for name in _DEGREES)
    if world % (tp * pp * sp):
        parts = [f"{label} {value}" for label, value in (("tp", tp), ("pp", pp), ("sp", sp)) if value > 1]
        product = f" = {tp * pp * sp}" if len(parts) > 1 else ""
        return [f"{' x '.join(parts)}{product} does not divide the world size {world}"]
    dp = world // (tp * pp * sp)
    all_degrees_fixed = all(getattr(s, name) != "auto" for name in _DEGREES)
    m, b = s.num_microbatches, s.microbatch_size
    if not all_degrees_fixed:
        return []
    if problem.global_batch % dp:
        return [f"global batch {problem.global_batch} does not divide by dp {dp}"]
    per_rank = problem.global_batch // dp
    if isinstance(m, int) and isinstance(b, int) and m * b != per_rank:
        return [f"dp {dp} x {m} microbatches x {b} = {dp * m * b} is not the global batch {problem.global_batch}"]
    for count, what in ((m, "microbatches"), (b, "sequences a microbatch")):
        if isinstance(count, int) and per_rank % count:
            return [f"global batch {problem.global_batch} over dp {dp} = {per_rank} does not divide by {count} {what}"]
    return []


def _layout_reasons(problem: Problem) -> list[str]:
    """Rules broken by the layout that the fixed values ask for, with ones and defaults elsewhere."""
    s = problem.settings
    tp, pp, sp = (_fixed_or(s, name, 1) for name in _DEGREES)
    dp = max(1, problem.world_size // (tp * pp * sp))
    microbatch = _fixed_or(s, "microbatch_size", 1)
    style = "1f1b" if s.pp_style == "auto" else s.pp_style
    default_chunks = 1 if style == "1f1b" else 2
    mode = None if s.sequence_parallelism_mode == "auto" else s.sequence_parallelism_mode
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        sp=sp,
        ep=_fixed_or(s, "ep_size", 1),
        num_microbatches=_fixed_or(s, "num_microbatches", max(1, problem.global_batch // (dp * microbatch))),
        microbatch=microbatch,
        seq=problem.seq,
        sequence_mode=mode,
        style=style,
        chunks=_fixed_or(s, "num_model_chunks", default_chunks),
        zero=1 if s.zero_stage == "auto" else s.zero_stage,
        zero_shard=s.zero_shard_size,
        cpu_offload=s.cpu_offload,
        fp8=s.use_fp8,
    )
    found = problems(problem.shape, layout, problem.world_size)
    return found or [f"global batch {problem.global_batch} does not spread evenly over any dp and microbatch size"]


def _nearest_layouts(problem: Problem) -> list[str]:
    s = problem.settings
    wanted = {name: getattr(s, name) for name in _DEGREES if getattr(s, name) != "auto"}
    free: dict[str, object] = {name: "auto" for name in (*_DEGREES, "ep_size", "pp_style", "num_model_chunks")}
    free |= {"zero_stage": "auto", "zero_shard_size": None, "cpu_offload": False}
    free |= {"num_microbatches": "auto", "microbatch_size": "auto", "sequence_parallelism_mode": "auto"}
    relaxed = replace(problem, settings=s.model_copy(update=free))
    seen: dict[tuple[int, int, int, int, int], float] = {}
    size = s.microbatch_size if isinstance(s.microbatch_size, int) else 0
    for layout in legal_bases(relaxed):
        sizes = {"tp_size": layout.tp, "pp_size": layout.pp, "sp_size": layout.sp}
        distance = sum(abs(log2(sizes[name] / value)) for name, value in wanted.items())
        if size:
            distance += 0.5 * abs(log2(layout.microbatch / size))
        key = (layout.sp, layout.tp, layout.pp, layout.dp, layout.microbatch if size else 0)
        seen[key] = min(seen.get(key, distance), distance)
    best = sorted(seen, key=lambda key: (seen[key], key))[:3]
    return [
        f"tp {tp} · pp {pp} · dp {dp}" + (f" · sp {sp}" if sp > 1 else "") + (f" with microbatches of {b}" if b else "")
        for sp, tp, pp, dp, b in best
    ]


def nothing_fits(problem: Problem, least: Candidate, limit_gib: float, recipe: str, num_nodes: int) -> NothingFitsError:
    """Return the error for a model that no legal layout brings into memory, with the smallest shortfall."""
    layout = least.layout
    ranks = [problem.runtime.rank_memory(layout, r) for r in range(layout.pp)]
    worst = max(ranks, key=lambda rank: rank.total_gib)
    where = f"{num_nodes} x {problem.hardware.name}"
    degrees = f"tp {layout.tp} · pp {layout.pp} · dp {layout.dp}, zero {layout.zero}, {layout.recompute} recompute"
    kinds = ("weights", "gradients", "optimizer", "activations", "logits", "workspace")
    parts = " + ".join(f"{kind} {getattr(worst, kind + '_gib'):.1f}" for kind in kinds)
    message = (
        f"recipe {recipe} does not fit on {where}: the smallest layout ({degrees}) "
        f"needs {least.memory_gib:.1f} GiB a GPU, {limit_gib:.1f} are usable, "
        f"{least.memory_gib - limit_gib:.1f} GiB are missing\n{parts} GiB"
    )
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
    everything = {name: "auto" for name in (*_LAYOUT_FIELDS, "zero_stage") if getattr(s, name) != "auto"}
    if len(everything) > 1:
        releases += ((f"leave {', '.join(everything)} auto", everything | {"gradient_checkpoint_config": _full(s)}),)
    for words, update in releases:
        if any(getattr(s, name) != value for name, value in update.items()):
            changed = replace(problem, settings=s.model_copy(update=update))
            if fits_somehow(changed, limit_gib):
                found.append(words)
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
