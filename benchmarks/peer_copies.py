#!/usr/bin/env python
"""What products lose while a collective of NCCL, or a copy by the GPUs' copy engines, runs beside them.

    benchmarks/peer_copies.py --gpus 2 --out benchmarks/results/peer_copies.json

Twenty wide bf16 products alone, and again with as many transfers of 128 MiB begun before them as fill four fifths of
that time. ``lost_ms`` is what each transfer adds, ``share`` its part of the transfer's own time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

MIB = 2**20
PRODUCTS = 20


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, help="GPUs of this host (default: %(default)s)")
    parser.add_argument(
        "--max-ctas", type=int, nargs="*", default=[8, 4], help="all-gathers over that many channels, too"
    )
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    from hpjob.runtime.process_pool import ProcessPool

    with ProcessPool(options.gpus, backend="nccl", timeout_s=120) as pool:
        rows = pool.run(measure, options.max_ctas, world=options.gpus)[0]
    for row in rows:
        print(json.dumps(row))
    if options.out:
        options.out.write_text(json.dumps({"gpus": options.gpus, "transfers": rows}, indent=1) + "\n")
    return 0


def measure(max_ctas: list[int]) -> list[dict[str, Any]]:
    """Return what this rank of the default group finds; ``max_ctas`` as of the options."""
    import torch
    import torch.distributed as dist

    from hpjob.runtime.parallel.peer_memory import SideStream, allocator, reaches_peers

    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("there is no process group")
    device = torch.device("cuda", torch.cuda.current_device())
    size, rank = group.size(), group.rank()
    inputs = torch.randn(16384, 4096, device=device, dtype=torch.bfloat16)
    weight = torch.randn(11008, 4096, device=device, dtype=torch.bfloat16) * 0.02
    outputs = inputs @ weight.t()
    whole = torch.empty(64 * MIB * size, device=device, dtype=torch.bfloat16)
    sums = torch.randn(32 * MIB * size, device=device)
    wait: dict[str, Callable[[], Callable[[], object]]] = {
        "all-gather, bf16": lambda: _gather(whole, rank, size, group),
        "reduce-scatter, fp32": lambda: _reduce(sums, rank, size, group),
    }
    for channels in max_ctas:
        settings = dist.ProcessGroupNCCL.Options()
        settings.config.max_ctas = channels
        narrow = dist.new_group(list(range(size)), backend="nccl", pg_options=settings)
        wait[f"all-gather, bf16, max_ctas {channels}"] = partial(_gather, whole, rank, size, narrow)
    if reaches_peers(group, device):
        side, memory = SideStream(device), allocator(group, device)(128 * MIB)
        theirs = memory.of((rank + 1) % size, (64 * MIB,), torch.bfloat16)
        arrived = torch.empty_like(theirs)

        def copy() -> Callable[[], object]:
            with side.following():
                arrived.copy_(theirs)
            return side.join

        wait["copy of a peer's memory"] = copy

    def products() -> None:
        for _ in range(PRODUCTS):
            torch.mm(inputs, weight.t(), out=outputs)

    alone = _milliseconds(products, 4)
    rows: list[dict[str, Any]] = []
    for name, begin in wait.items():
        own = _milliseconds(lambda begin=begin: begin()(), 6)  # type: ignore[misc]
        count = torch.tensor(max(1, int(0.8 * alone / own)), device=device)
        dist.broadcast(count, 0)

        def both(begin: Any = begin, count: int = int(count)) -> None:
            pending = [begin() for _ in range(count)]
            products()
            for finish in pending:
                finish()

        lost = (_milliseconds(both, 3) - alone) / int(count)
        rows.append({"transfer": name, "count": int(count), "own_ms": own, "lost_ms": lost, "share": lost / own})
    return [{"products_ms": alone}, *rows]


def _gather(whole: Any, rank: int, size: int, group: Any) -> Callable[[], object]:
    import torch.distributed as dist

    finish: Callable[[], object] = dist.all_gather_into_tensor(
        whole, whole.chunk(size)[rank], group=group, async_op=True
    ).wait
    return finish


def _reduce(sums: Any, rank: int, size: int, group: Any) -> Callable[[], object]:
    import torch.distributed as dist

    finish: Callable[[], object] = dist.reduce_scatter_tensor(
        sums.chunk(size)[rank], sums, group=group, async_op=True
    ).wait
    return finish


def _milliseconds(work: Callable[[], object], times: int) -> float:
    """Return how long some work takes on the device, the mean of some times after two more."""
    import torch
    import torch.distributed as dist

    for _ in range(2):
        work()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times


if __name__ == "__main__":
    sys.exit(main())
