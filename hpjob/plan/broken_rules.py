"""What is wrong with the values that a recipe fixes, in sentences."""

from __future__ import annotations

from hpjob.plan.layout import Layout
from hpjob.plan.legality import problems
from hpjob.plan.problem import Problem
from hpjob.recipe.model import ParallelSettings, SequenceParallelismMode

_DEGREES = ("tp_size", "pp_size", "sp_size")


def broken_rules(problem: Problem) -> list[str]:
    """Return every rule that the fixed values break, as sentences."""
    return [*_degree_reasons(problem), *_layout_reasons(problem)]


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
    mode = _mode(s, sp)
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
        cpu_offload=s.cpu_offload is True,
        fp8=s.use_fp8,
    )
    if s.enable_sequence_parallelism is True and mode is None and tp == 1:
        return [
            "enable_sequence_parallelism needs tp above 1 (split_gather, ring) or sp above 1 (all_to_all, ring_attn)"
        ]
    # Where the degrees do not make the world, that was said already.
    return problems(problem.shape, layout, layout.world_size)


def _mode(s: ParallelSettings, sp: int) -> SequenceParallelismMode | None:
    """Return the mode that is fixed; with an axis of its own and none fixed, the one with the fewest rules."""
    if s.enable_sequence_parallelism is False:
        return None
    if s.sequence_parallelism_mode != "auto":
        return s.sequence_parallelism_mode
    return "ring_attn" if sp > 1 else None
