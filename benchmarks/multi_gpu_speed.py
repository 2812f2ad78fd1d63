"""Tokens per second and GPU of every layout beside one GPU, and beside the planner's prediction."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.measure import measure_layout, measure_peer
from benchmarks.workload import LLAMA_7B, PEAK_TFLOPS, TINY, flops_per_token, work_case
from hpjob.core.errors import HpjobError
from hpjob.plan.hardware import Hardware, hardware_of
from hpjob.plan.legality import layout_of
from hpjob.plan.own_runtime import OwnRuntime
from hpjob.plan.shape import shape_of
from hpjob.runtime.parity.case import Case
from hpjob.runtime.process_pool import ProcessPool, WorkerError
from hpjob.runtime.support import unsupported
from hpjob.topology.load import load_machine

_PIPELINE_MICROBATCHES = 16
_LONG = 32768
"""From this length on layers are recomputed, every second one: one GPU could not hold them otherwise."""


def speed(
    pool: ProcessPool, options: argparse.Namespace, layouts: Mapping[str, str], deadline: float
) -> Iterator[dict[str, Any]]:
    """Yield one record a layout and sequence; ``one GPU`` comes first and again at the end of each sequence.

    A pipeline is compared with one GPU that has its microbatch size: what is lost is then the schedule's.
    """
    for seq in options.sequences:
        bases: dict[tuple[int, int], float] = {}
        again = {} if options.once else {"one GPU, again": ""}
        of_seq = {name: text for name, text in layouts.items() if is_wanted(name, options.cases, seq)}
        for name, text in {**of_seq, **again}.items():
            if time.monotonic() > deadline:
                yield {"layout": name, "seq": seq, "skipped": "out of time"}
                continue
            case, tokens = _case(text, seq, options)
            size = case.plan.pipeline.microbatch_size if case.plan.degrees.pp > 1 else 0
            reasons = unsupported(case.plan, case.recipe)
            if reasons:
                yield {"layout": name, "seq": seq, "refused": reasons}
                continue
            if (tokens, size) not in bases:
                label = f"one GPU, microbatches of {size}" if size else "one GPU"
                base = _measured(pool, label, _case("", seq, options, tokens, size)[0], options)
                bases[tokens, size] = base.get("tokens_per_s_per_gpu", float("nan"))
                yield base
            record = _measured(pool, name, case, options)
            if "tokens_per_s_per_gpu" in record:
                record["of_one_gpu"] = record["tokens_per_s_per_gpu"] / bases[tokens, size]
                record |= _bound(case)
            yield record
        yield from (_measured_peer(pool, name, seq, options) for name in options.peers)


def is_wanted(name: str, cases: Sequence[str] | None, seq: int | None = None) -> bool:
    """Whether a layout is among those asked for; ``32768:ring`` asks for layouts with ``ring`` at that length only.

    Args:
        name: Of the layout.
        cases: Parts of names; None = all.
        seq: Tokens of a sequence; None = any.
    """
    if not cases:
        return True
    asked = [case.rpartition(":") for case in cases]
    return any(part in name and (not length or seq is None or int(length) == seq) for length, _, part in asked)


def _case(
    text: str, seq: int, options: argparse.Namespace, tokens_per_gpu: int | None = None, microbatch_size: int = 0
) -> tuple[Case, int]:
    """Return a layout at a sequence length, and its tokens per GPU and step."""
    shape = TINY if options.tiny else LLAMA_7B
    world = options.gpus if text else 1
    settings: dict[str, object] = {"num_hidden_layers": options.layers, "seq_length": seq, "precision": "bf16"}
    if seq >= _LONG:
        settings |= {"recompute": "full", "every_kth_layer": 2}
    layout = text or "zero_stage=0"
    degrees = work_case(layout, shape, settings, world=world).plan.degrees
    tokens = tokens_per_gpu or options.tokens_per_gpu
    if degrees.pp > 1:
        # Enough microbatches to fill the pipeline; the base gets as many tokens.
        wanted = _PIPELINE_MICROBATCHES if seq < _LONG else 2
        tokens = max(tokens, wanted * seq * degrees.dp // world)
    sequences = tokens * world // seq // degrees.dp
    size = max(options.microbatch_tokens, seq) * degrees.tp * degrees.sp // seq
    if degrees.pp > 1:
        size = max(1, sequences // _PIPELINE_MICROBATCHES)
    size = microbatch_size or max(1, min(size, sequences))
    settings |= {"microbatch_size": size, "num_microbatches": max(1, sequences // size)}
    return work_case(layout, shape, settings, world=world), tokens


def _measured(pool: ProcessPool, name: str, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    plan = case.plan
    record: dict[str, Any] = {"layout": name, "seq": plan.seq_length, "plan": plan.summary, "recompute": plan.recompute}
    try:
        ranks = pool.run(measure_layout, case, options.warm_up, options.steps, options.profile, world=case.world)
    except (WorkerError, HpjobError) as error:
        return record | {"failed": str(error)[-1500:]}
    record |= figures(ranks, case)
    if options.profile:
        record["profile"] = ranks[0]["profile"]
    return record | _prediction(case, record["median_step_s"])


def _measured_peer(pool: ProcessPool, name: str, seq: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure another system, which spreads the model over all ranks in its own way, beside our data parallelism."""
    case, _ = _case(f"dp_size={options.gpus} zero_stage=3", seq, options)
    record: dict[str, Any] = {"layout": name, "seq": seq}
    if case.plan.pipeline.num_microbatches > 1:
        return record | {"refused": ["it runs all tokens at once: give --microbatch-tokens as many as a step has"]}
    try:
        ranks = pool.run(measure_peer, case, name, options.warm_up, options.steps, world=case.world)
        return record | figures(ranks, case)
    except (WorkerError, HpjobError) as error:
        return record | {"failed": str(error)[-1500:]}


def figures(ranks: Sequence[Mapping[str, Any]], case: Case) -> dict[str, Any]:
    """Return speed, share of the peak and memory from what the ranks measured; the slowest rank decides a step."""
    steps = [max(seconds) for seconds in zip(*(rank["step_s"] for rank in ranks), strict=True)]
    step_s = median(steps)
    tokens = case.plan.global_batch_size * case.plan.seq_length / case.world
    tflops = tokens / step_s * flops_per_token(case) / 1e12
    return {
        "tokens_per_gpu": tokens,
        "step_s": steps,
        "median_step_s": step_s,
        "tokens_per_s_per_gpu": tokens / step_s,
        "tflops": tflops,
        "mfu": tflops / PEAK_TFLOPS,
        "peak_allocated_gib": [rank.get("peak_allocated_gib") for rank in ranks],
        "peak_reserved_gib": [rank.get("peak_reserved_gib") for rank in ranks],
        "peer_memory_gib": [rank.get("peer_memory_gib") for rank in ranks],
        "first_step_s": ranks[0]["first_step_s"],
        "build_s": ranks[0]["build_s"],
        "loss": ranks[0]["loss"],
    }


def _prediction(case: Case, step_s: float) -> dict[str, Any]:
    """Return what the planner says of this layout on this kind of machine."""
    shape = shape_of(case.recipe.model)
    hardware: Hardware = hardware_of(load_machine("hgx-h200"), max(2, case.world))
    layout = layout_of(case.plan)
    model = OwnRuntime(shape, hardware)
    time_ = model.step(layout)
    return {
        "predicted_s": time_.step,
        "predicted_error": time_.step / step_s - 1,
        "predicted_gib": model.worst_gib(layout),
    }


def _bound(case: Case) -> dict[str, float]:
    """Return the share of one GPU's speed that a pipeline's schedule leaves, its stages as unequal as they are.

    The longest stage sets the pace; filling and draining cost the other stages once, divided over the chunks, and
    nothing where weight gradients fill the gaps.
    """
    pipeline, pp = case.plan.pipeline, case.plan.degrees.pp
    if pp == 1:
        return {}
    shape = case.recipe.model
    head = 6.0 * shape.vocab_size * shape.hidden_size
    layer = (flops_per_token(case) - head) / shape.num_hidden_layers
    stages = [count * layer for count in pipeline.layers_per_stage]
    stages[-1] += head
    # Chunks go round the ranks; the two of zbv go down and come back up.
    last = len(stages) - 1
    owner = [min(s, last - s) if pipeline.style == "zbv" else s % pp for s in range(len(stages))]
    ranks = [sum(stage for stage, of in zip(stages, owner, strict=True) if of == rank) for rank in range(pp)]
    idle = 0.0 if pipeline.style == "zbv" else (sum(ranks) - max(ranks)) / pipeline.num_model_chunks
    m = pipeline.num_microbatches
    return {"schedule_bound": m * sum(ranks) / pp / (m * max(ranks) + idle)}
