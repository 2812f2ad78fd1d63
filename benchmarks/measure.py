"""What one rank measures of a layout: seconds of a step, memory, and optionally a profile."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hpjob.runtime.engine import Batch, Engine
from hpjob.runtime.mesh import build_mesh
from hpjob.runtime.model.parameters import fill_quickly
from hpjob.runtime.parallel.peer_memory import held_bytes
from hpjob.runtime.parity.case import Case

GIB = 2**30


class QuickEngine(Engine):
    """Fills weights on the device: a speed does not need the layout-independent numbers, which one core makes."""

    fill_weights = staticmethod(fill_quickly)


def measure_layout(case: Case, warm_up: int, steps: int, profile: bool = False) -> dict[str, Any]:
    """Time a layout on this rank of the default process group.

    Returns:
        ``step_s`` of every timed step, ``build_s``, ``first_step_s``, peak memory and the last loss.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    _forget(device)
    began = time.perf_counter()
    mesh = build_mesh(case.plan, device.type)
    engine = QuickEngine(case.plan, case.recipe, mesh, device)
    batches = [random_batch(case, device, seed) for seed in range(2)]
    built = time.perf_counter()
    seconds = [_timed_step(engine, batches, step, device)[0] for step in range(1, warm_up + 1)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    timed = [_timed_step(engine, batches, warm_up + step, device) for step in range(1, steps + 1)]
    record = {
        "step_s": [second for second, _ in timed],
        "loss": timed[-1][1],
        "build_s": built - began,
        "first_step_s": seconds[0],
        **_memory(device),
    }
    if profile:
        record["profile"] = profile_step(lambda: engine.train_step(batches[0], warm_up + steps + 1))
    return record


def measure_peer(case: Case, name: str, warm_up: int, steps: int) -> dict[str, Any]:
    """Time another system on this rank, on the same work in one microbatch.

    Args:
        case: Shape, sequences of a rank, and sequence length.
        name: One of :data:`benchmarks.peers.PEERS`.
        warm_up: Steps before.
        steps: Timed steps.

    Returns:
        As of :func:`measure_layout`; the loss is not known.
    """
    from benchmarks.peers import PEERS

    device = torch.device("cuda", torch.cuda.current_device())
    _forget(device)
    began = time.perf_counter()
    step = PEERS[name](case)
    tokens = random_batch(case, device, seed=dist.get_rank()).input_ids
    built = time.perf_counter()
    seconds = [seconds_of(lambda: step(tokens), device) for _ in range(warm_up)]
    torch.cuda.reset_peak_memory_stats()
    return {
        "step_s": [seconds_of(lambda: step(tokens), device) for _ in range(steps)],
        "loss": None,
        "build_s": built - began,
        "first_step_s": seconds[0],
        **_memory(device),
    }


def random_batch(case: Case, device: torch.device, seed: int) -> Batch:
    """Return random tokens of the size that a data-parallel rank gets; all labels count."""
    pipeline = case.plan.pipeline
    shape = (pipeline.num_microbatches * pipeline.microbatch_size, case.plan.seq_length)
    tokens = torch.randint(0, case.recipe.model.vocab_size, shape, generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(shape[1]).expand(shape).contiguous()
    return Batch(input_ids=tokens.to(device), labels=tokens.roll(-1, 1).to(device), position_ids=positions.to(device))


def profile_step(step: Any) -> dict[str, Any]:
    """Return the milliseconds of the kernels of one step and the share of time in which the GPU was busy."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    events = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.device_time > 0]
    spans = sorted((e.time_range.start, e.time_range.end) for e in events)
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    kernels: dict[str, float] = {}
    for event in events:
        kernels[event.name[:80]] = kernels.get(event.name[:80], 0.0) + event.device_time / 1e3
    top = sorted(kernels.items(), key=lambda pair: -pair[1])[:25]
    return {
        "span_ms": (end - spans[0][0]) / 1e3,
        "busy_share": busy / (end - spans[0][0]),
        "num_kernels": len(events),
        "kernels_ms": {name: round(ms, 3) for name, ms in top},
    }


def _timed_step(engine: Engine, batches: list[Batch], step: int, device: torch.device) -> tuple[float, float]:
    losses: list[float] = []
    seconds = seconds_of(lambda: losses.append(engine.train_step(batches[step % len(batches)], step).loss), device)
    return seconds, losses[0]


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return how long some work takes on a device, from one moment at which all ranks are idle to the next."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _memory(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    shared = held_bytes()
    return {
        "peak_allocated_gib": (torch.cuda.max_memory_allocated() + shared) / GIB,
        "peak_reserved_gib": (torch.cuda.max_memory_reserved() + shared) / GIB,
        "peer_memory_gib": shared / GIB,
    }


def _forget(device: torch.device) -> None:
    """Start every layout without compiled code, cached blocks or leftovers of the one before."""
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
