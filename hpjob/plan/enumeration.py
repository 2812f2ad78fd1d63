"""Exact enumeration of legal layouts."""

from __future__ import annotations

from collections.abc import Iterator
from math import fsum
from typing import Literal

from hpjob.plan.layer_split import best_relief
from hpjob.plan.layout import Layout
from hpjob.plan.legality import problems, problems_beside_degrees
from hpjob.plan.problem import Problem
from hpjob.recipe.model import ParallelSettings, PipelineStyle, RecomputePolicy, SequenceParallelismMode

_MAX_AUTO_MICROBATCH = 32
_MAX_SEQUENCE_SHARDS = 32
_SHORTEST_SHARD = 2048
"""Tokens of a sequence below which a shard of it only adds traffic."""


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def legal_layouts(problem: Problem) -> Iterator[Layout]:
    """Yield every legal layout that keeps the recipe's fixed values."""
    for base in legal_bases(problem):
        for zero in zero_stages(problem.settings, base):
            for recompute, k in recompute_policies(problem):
                yield base._replace(zero=zero, recompute=recompute, every_kth=k)


def legal_bases(problem: Problem) -> Iterator[Layout]:
    """Yield the legal layouts with the first ZeRO stage and the fastest recomputation; no rule forbids the others."""
    s = problem.settings
    recompute, k = recompute_policies(problem)[0]
    for tp, sp, pp, ep in _degrees(problem):
        dp = problem.world_size // (tp * sp * pp)
        for microbatch, count in _batches(problem, dp):
            base = Layout(
                tp=tp,
                pp=pp,
                dp=dp,
                sp=sp,
                ep=ep,
                num_microbatches=count,
                microbatch=microbatch,
                seq=problem.seq,
                precision=s.precision,
                cpu_offload=s.cpu_offload is True,
                zero=0 if s.zero_stage == 0 else 1,
                recompute=recompute,
                every_kth=k,
                zero_shard=s.zero_shard_size,
                flash=s.enable_flash_attention is not False,
                fp8=s.use_fp8,
            )
            if problems(problem.shape, base._replace(sp=1, dp=dp * sp), problem.world_size):
                continue
            yield from _variants(problem, base)


def _variants(problem: Problem, base: Layout) -> Iterator[Layout]:
    s = problem.settings
    for mode in _modes(s, base):
        for style, chunks in _schedules(s, base, problem.shape.num_layers):
            shaped = base._replace(sequence_mode=mode, style=style, chunks=chunks)
            if problems_beside_degrees(problem.shape, shaped):
                continue
            yield shaped
            if relief := _relief(problem, shaped):
                yield shaped._replace(relief=relief)


def _relief(problem: Problem, layout: Layout) -> int:
    """Layers that the last stage should give away, by the times of head and layer."""
    if layout.pp == 1:
        return 0
    layers = problem.runtime.time_model(layout).layers
    head = fsum(layers.head(layout)) / fsum(layers.passes(layout, problem.shape.num_experts > 0)[:3])
    return best_relief(problem.shape.num_layers, layout.pp, layout.chunks, layout.style, round(head, 2))


def _options(fixed: int | str, choices: list[int]) -> list[int]:
    return choices if isinstance(fixed, str) else [fixed]


def _degrees(problem: Problem) -> Iterator[tuple[int, int, int, int]]:
    s, world = problem.settings, problem.world_size
    sizes = divisors(world)
    inside = [d for d in sizes if d <= problem.hardware.island_size]
    for tp in _options(s.tp_size, inside):
        for sp in _options(s.sp_size, _sequence_shards(problem, sizes)):
            for pp in _options(s.pp_size, [d for d in sizes if d <= problem.shape.num_layers]):
                if world % (tp * sp * pp) == 0:
                    for ep in _options(s.ep_size, _expert_shards(problem, world // (tp * pp))):
                        yield tp, sp, pp, ep


def _sequence_shards(problem: Problem, sizes: list[int]) -> list[int]:
    if problem.settings.enable_sequence_parallelism is False:
        return [1]
    return [d for d in sizes if d == 1 or (d <= _MAX_SEQUENCE_SHARDS and problem.seq // d >= _SHORTEST_SHARD)]


def _expert_shards(problem: Problem, data: int) -> list[int]:
    experts = problem.shape.num_experts
    return [d for d in divisors(experts) if data % d == 0] if experts else [1]


def _batches(problem: Problem, dp: int) -> Iterator[tuple[int, int]]:
    """Microbatch size and count that make the global batch exact."""
    s = problem.settings
    if problem.global_batch % dp:
        return
    per_rank = problem.global_batch // dp
    for microbatch in _options(s.microbatch_size, [d for d in divisors(per_rank) if d <= _MAX_AUTO_MICROBATCH]):
        if per_rank % microbatch == 0 and s.num_microbatches in ("auto", per_rank // microbatch):
            yield microbatch, per_rank // microbatch
    fixed = s.num_microbatches
    if not isinstance(fixed, int) or s.microbatch_size != "auto" or per_rank % fixed:
        return
    if per_rank // fixed > _MAX_AUTO_MICROBATCH:
        yield per_rank // fixed, fixed


def _modes(s: ParallelSettings, base: Layout) -> list[SequenceParallelismMode | None]:
    if s.enable_sequence_parallelism is False:
        return [None]
    if s.sequence_parallelism_mode != "auto":
        return [s.sequence_parallelism_mode]
    if base.sp > 1:
        return ["all_to_all", "ring_attn"]
    sharded: list[SequenceParallelismMode | None] = ["split_gather", "ring"] if base.tp > 1 else []
    return sharded if s.enable_sequence_parallelism is True else [None, *sharded]


def _schedules(s: ParallelSettings, base: Layout, num_layers: int) -> list[tuple[PipelineStyle, int]]:
    fixed = s.num_model_chunks
    if base.pp == 1:
        return [("1f1b", 1)]
    styles: list[PipelineStyle] = ["1f1b", "interleaved", "zbv"] if s.pp_style == "auto" else [s.pp_style]
    found = []
    for style in styles:
        if style == "interleaved":
            choices = [v for v in (2, 3, 4, 5, 6, 8, 10) if num_layers % (base.pp * v) == 0 or v == 2]
        else:
            choices = [1 if style == "1f1b" else 2]
        found += [(style, v) for v in _options(fixed, choices)]
    return found


def zero_stages(s: ParallelSettings, base: Layout) -> list[Literal[0, 1, 2, 3]]:
    if s.zero_stage != "auto":
        return [s.zero_stage]
    if s.cpu_offload is True or s.zero_shard_size is not None:
        return [1, 2, 3]
    return [0] if base.dp * base.sp == 1 else [0, 1, 2, 3]


def recompute_policies(problem: Problem) -> list[tuple[RecomputePolicy, int]]:
    """Return the policies that the recipe allows with their every-k-th layer, the fastest first.

    Each of them needs less memory than the one before. ``selective`` repeats the attention core, which fused
    kernels never keep, so it is tried only without them. Layers that are counted stage by stage are priced as
    the nearest every-k-th.
    """
    s = problem.settings
    wish = s.gradient_checkpoint_config
    counts = wish.num_ckpt_layers_per_stage
    if wish.policy != "auto" or counts is not None:
        k = max(1, round(problem.shape.num_layers / max(1, sum(counts)))) if counts else wish.every_kth_layer
        return [("full" if wish.policy == "auto" else wish.policy, k)]
    selective: list[tuple[RecomputePolicy, int]] = [("selective", 1)] if s.enable_flash_attention is False else []
    return [("none", 1), *selective, *(("full", k) for k in (4, 3, 2, 1))]
