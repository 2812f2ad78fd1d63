#!/usr/bin/env python
"""How long collectives and messages take by size on the GPUs of one host, and the line through it.

    benchmarks/link_curves.py --gpus 2 --out benchmarks/results/link_curves-2.json
    benchmarks/link_curves.py --fit FILE      # fits another tool's lines, JSON objects with bus bandwidths
    benchmarks/link_curves.py --device cpu    # tries the script through gloo

Seconds are ``latency + bytes / bandwidth``; bytes are those that a rank sends: (n - 1) / n of the gathered size for an
all-gather, reduce-scatter or all-to-all, twice that for an all-reduce, all of them for a message. The line has the
least sum of squared relative errors. ``links`` at the end is what a site file takes: ``hpjob plan --site FILE``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

MIB = 2**20
SIZES_MIB = (1, 4, 16, 64, 256, 1024)
_BUS_KEYS = {
    "allreduce_busbw": "all_reduce",
    "ag_busbw": "all_gather",
    "rs_busbw": "reduce_scatter",
    "a2a_busbw": "all_to_all",
    "p2p": "message",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or read curves, fit them, print and write both."""
    options = _options(arguments)
    curves = _read(options.fit, options.gpus) if options.fit else _measure(options)
    record = {
        "gpus": options.gpus,
        "curves": curves,
        "fits": {name: fit_line(points) for name, points in curves.items()},
    }
    record["links"] = _site_links(record["fits"])
    for name, fit in record["fits"].items():
        print(f"{name}: {fit['latency_us']:.1f} us + bytes / {fit['gb_s']:.0f} GB/s, off by up to {fit['worst']:.0%}")
    print("links: " + json.dumps(record["links"]))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def fit_line(points: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the line of the least squared relative errors.

    Args:
        points: Bytes that a rank sends, seconds.

    Returns:
        ``latency_us``, not below zero; ``gb_s``; ``worst``, the largest relative error.
    """
    sent, seconds = np.array(points).T
    rows = np.stack([1.0 / seconds, sent / seconds], axis=1)
    latency, per_byte = np.linalg.lstsq(rows, np.ones(len(seconds)), rcond=None)[0]
    if latency < 0:
        latency, per_byte = 0.0, float((sent / seconds).sum() / ((sent / seconds) ** 2).sum())
    errors = (latency + sent * per_byte) / seconds - 1.0
    return {"latency_us": latency * 1e6, "gb_s": 1e-9 / per_byte, "worst": float(np.abs(errors).max())}


def sent_bytes(kind: str, size: float, ranks: int) -> float:
    """Return the bytes that each rank sends of ``size`` bytes."""
    if kind == "message":
        return size
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks * size


def _site_links(fits: dict[str, dict[str, float]]) -> dict[str, float]:
    used = [fits[name] for name in ("all_gather", "reduce_scatter") if name in fits]
    return {
        "island_gb_s": round(sum(fit["gb_s"] for fit in used) / len(used), 1),
        "island_latency_us": round(max(0.1, sum(fit["latency_us"] for fit in used) / len(used)), 1),
    }


def _read(path: Path, ranks: int) -> dict[str, list[tuple[float, float]]]:
    """Curves of a file in which some lines are objects with ``MiB`` and bus bandwidths."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line) if line.startswith("{") else {}
        for key, name in _BUS_KEYS.items():
            if key in entry:
                sent = sent_bytes(name, entry["MiB"] * MIB, ranks)
                curves.setdefault(name, []).append((sent, sent / (entry[key] * 1e9)))
    return curves


def _measure(options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    from hpjob.runtime.process_pool import ProcessPool

    backend = "nccl" if options.device == "cuda" else "gloo"
    with ProcessPool(options.gpus, backend=backend, timeout_s=120.0) as pool:
        ranks: list[dict[str, list[tuple[float, float]]]] = pool.run(
            rank_curves, options.device, options.sizes_mib, world=options.gpus
        )
    # A collective ends when its slowest rank does.
    return {
        name: [max(points, key=lambda point: point[1]) for points in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
    }


def rank_curves(device: str, sizes_mib: Sequence[int]) -> dict[str, list[tuple[float, float]]]:
    """Time every kind and size on this rank of the default process group; a collective call of all ranks."""
    import torch
    import torch.distributed as dist

    world, rank = dist.get_world_size(), dist.get_rank()
    curves: dict[str, list[tuple[float, float]]] = {}
    for size in sizes_mib:
        whole = torch.zeros(size * MIB // 2 // world * world, dtype=torch.bfloat16, device=device)
        other = torch.empty_like(whole)
        part = torch.zeros(whole.numel() // world, dtype=whole.dtype, device=device)
        peer = rank ^ 1
        kinds: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda w=whole: dist.all_reduce(w),
            "all_gather": lambda w=whole, p=part: dist.all_gather_into_tensor(w, p),
            "reduce_scatter": lambda w=whole, p=part: dist.reduce_scatter_tensor(p, w),
            "all_to_all": lambda w=whole, o=other: dist.all_to_all_single(o, w),
        }
        if peer < world:
            kinds["message"] = lambda w=whole, o=other, p=peer: dist.send(w, p) if rank < p else dist.recv(o, p)
        for name, run in kinds.items():
            sent = sent_bytes(name, whole.numel() * 2, world)
            curves.setdefault(name, []).append((sent, _seconds(run, device)))
    return curves


def _seconds(run: Callable[[], Any], device: str) -> float:
    import torch

    def timed(times: int) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            run()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / times

    timed(3)
    return median(timed(5) for _ in range(5))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--sizes-mib", type=int, nargs="+", default=list(SIZES_MIB), help="whole sizes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="nccl or gloo")
    parser.add_argument("--fit", type=Path, help="fit the curves of this file and measure nothing")
    parser.add_argument("--out", type=Path, help="file of the results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
