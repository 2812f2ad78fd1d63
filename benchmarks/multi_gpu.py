#!/usr/bin/env python
"""Layouts over several GPUs of one host: the same numbers as one GPU, and how much of its speed is left.

    benchmarks/multi_gpu.py --gpus 2 --out benchmarks/results/multi_gpu-2.json
    benchmarks/multi_gpu.py --table benchmarks/results/multi_gpu-2.json
    benchmarks/multi_gpu.py --gpus 2 --device cpu --tiny      # tries the script itself

Speed is tokens/s per GPU of a layout beside one GPU with the same tokens per GPU, shape and sequence, in one
call. A layout that the runtime refuses is listed with its reason. The file is rewritten after every result, so
a call that is cut off leaves what it had.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PARTS = ("facts", "parity", "runs", "speed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or print the table of an earlier measurement."""
    options = _options(arguments)
    if options.table:
        from benchmarks.tables import multi_gpu_table

        print(multi_gpu_table(json.loads(options.table.read_text())))
        return 0
    record: dict[str, Any] = {"gpus": options.gpus, "began": time.time()}
    for key, result in _measure(options):
        record.setdefault(key, []).append(result)
        print(json.dumps({key: result}), flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _measure(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what was found, under the name of its part."""
    from benchmarks.gpu_parity import parity
    from benchmarks.layouts import mixed, single_axis
    from benchmarks.multi_gpu_speed import speed
    from hpjob.runtime.process_pool import ProcessPool

    deadline = time.monotonic() + options.budget_s
    layouts = {**single_axis(options.gpus), **mixed(options.gpus)}
    layouts = {name: text for name, text in layouts.items() if not options.only or options.only in name}
    cuda = options.device == "cuda"
    if "facts" in options.parts:
        yield "facts", _facts(cuda)
    with (
        ThreadPoolExecutor(2) as checks,
        ProcessPool(options.gpus, backend="nccl" if cuda else "gloo", timeout_s=options.patience_s) as pool,
    ):
        pending = _start_runs(checks) if "runs" in options.parts else []
        if "parity" in options.parts:
            extra = "enable_jit_fused=false" if not options.compile_parity else ""
            for result in parity(pool, options.gpus, layouts, steps=options.parity_steps, extra=extra):
                yield "parity", result
        for name, future in pending:
            yield name, _result(future)
        if "speed" in options.parts:
            for result in speed(pool, options, layouts, deadline):
                yield "speed", result


def _start_runs(checks: ThreadPoolExecutor) -> list[tuple[str, Any]]:
    from benchmarks.run_checks import checkpoint_across_meshes, kill_one_rank

    folder = Path(tempfile.mkdtemp(prefix="hpjob-runs-"))
    (folder / "meshes").mkdir()
    (folder / "kill").mkdir()
    return [
        ("checkpoint", checks.submit(checkpoint_across_meshes, folder / "meshes")),
        ("kill", checks.submit(kill_one_rank, folder / "kill")),
    ]


def _result(future: Any) -> Any:
    try:
        return future.result()
    except Exception as error:
        return {"ok": False, "reason": f"{type(error).__name__}: {error}"[-1500:]}


def _facts(cuda: bool) -> dict[str, Any]:
    """Return versions, and what the driver says of GPUs and links."""
    import torch
    import transformers

    facts: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    if not cuda:
        return facts
    facts["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    facts["gpu"] = torch.cuda.get_device_name()
    for name, command in (("topo", "topo -m"), ("nvlink", "nvlink -s"), ("list", "-L")):
        done = subprocess.run(["nvidia-smi", *command.split()], capture_output=True, text=True, check=False)
        facts[name] = done.stdout or done.stderr
    return facts


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, help="GPUs to use (default: %(default)s)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to run (default: all)")
    parser.add_argument("--only", help="layouts whose name contains this text")
    parser.add_argument("--layers", type=int, default=16, help="decoder layers (default: %(default)s)")
    parser.add_argument("--sequences", type=int, nargs="+", default=[2048, 8192, 32768], help="tokens of a sequence")
    parser.add_argument("--tokens-per-gpu", type=int, default=32768, help="tokens of a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps, medians (default: %(default)s)")
    parser.add_argument("--parity-steps", type=int, default=10, help="steps of a parity case (default: %(default)s)")
    parser.add_argument("--compile-parity", action="store_true", help="parity with compiled layers")
    parser.add_argument("--budget-s", type=float, default=1e9, help="start no measurement after this many seconds")
    parser.add_argument("--patience-s", type=float, default=120.0, help="longest time of one layout")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="nccl or gloo")
    parser.add_argument("--tiny", action="store_true", help="a toy shape in place of the 7B one")
    parser.add_argument("--out", type=Path, default=Path("multi_gpu.json"), help="file of the results")
    parser.add_argument("--table", type=Path, help="print the table of this file and end")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
