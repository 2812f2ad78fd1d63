#!/usr/bin/env python
"""Layouts over several GPUs of one host: the same numbers as one GPU, how much of its speed is left, whole models.

    benchmarks/multi_gpu.py --gpus 2 --out benchmarks/results/multi_gpu-2.json
    benchmarks/multi_gpu.py --gpus 8 --parts facts models small --share 0.25 --budget-s 540 --out results
    benchmarks/multi_gpu.py --table benchmarks/results/multi_gpu-2.json
    benchmarks/multi_gpu.py --gpus 4 --device cpu --tiny      # tries the script itself
    benchmarks/multi_gpu.py --gpus 8 --list                   # what would be measured of whole models

``speed`` is tokens/s per GPU of a layout beside one GPU with the same tokens per GPU, shape and sequence, in one
call. ``models`` trains whole models in the planner's layout, its runners-up and layouts given by hand, each completed
by the planner, and says how far predictions are off and what the choice loses; ``small`` compares the numbers of the
same layouts on a small model with those of one GPU. Parts run in the order in which they are named. A layout that the
runtime refuses is listed with its reason. The file is rewritten after every result, so a call that is cut off leaves
what it had.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpjob.runtime.process_pool import ProcessPool

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PARTS = ("facts", "parity", "runs", "speed", "models", "small")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or print the table of an earlier measurement."""
    options = _options(arguments)
    if options.table:
        from benchmarks.tables import multi_gpu_table

        print(multi_gpu_table(json.loads(options.table.read_text())))
        return 0
    if options.list:
        return _list(options)
    out = options.out / f"multi_gpu-{options.gpus}.json" if options.out.suffix != ".json" else options.out
    out.parent.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in vars(options).items() if isinstance(value, int | float | str | list)}
    record: dict[str, Any] = {"gpus": options.gpus, "began": time.time(), "settings": settings}
    began = time.monotonic()
    for key, result in _measure(options, began + options.budget_s):
        if isinstance(result, dict):
            result["at_s"] = round(time.monotonic() - began, 1)
        record.setdefault(key, []).append(result)
        print(json.dumps({key: result}), flush=True)
        _write(out, record)
    print(f"written to {out}", flush=True)
    return 0


def _write(out: Path, record: Mapping[str, Any]) -> None:
    """Replace the file as a whole: a call that is cut off leaves the one before."""
    fresh = out.with_name(f"{out.name}.new")
    fresh.write_text(json.dumps(record, indent=1) + "\n")
    fresh.replace(out)


def _measure(options: argparse.Namespace, deadline: float) -> Iterator[tuple[str, Any]]:
    """Yield what was found, under the name of its part."""
    from hpjob.runtime.process_pool import ProcessPool

    cuda = options.device == "cuda"
    pending: list[tuple[str, Any]] = []
    with (
        ThreadPoolExecutor(2) as checks,
        ProcessPool(options.gpus, backend="nccl" if cuda else "gloo", timeout_s=options.patience_s) as pool,
    ):
        for part in options.parts:
            if part == "facts":
                yield "facts", _facts(cuda)
            elif part == "runs":
                pending = _start_runs(checks)
            else:
                if part in ("speed", "models"):
                    # Nothing else may use the GPUs then.
                    yield from _results(pending)
                yield from _part(part, pool, options, deadline)
        yield from _results(pending)


def _part(part: str, pool: ProcessPool, options: argparse.Namespace, deadline: float) -> Iterator[tuple[str, Any]]:
    from benchmarks.gpu_parity import parity
    from benchmarks.layouts import mixed, single_axis
    from benchmarks.multi_gpu_models import models, small_models
    from benchmarks.multi_gpu_speed import is_wanted, speed

    layouts = {**single_axis(options.gpus), **mixed(options.gpus)}
    layouts = {name: text for name, text in layouts.items() if is_wanted(name, options.cases)}
    if part == "parity":
        extra = "enable_jit_fused=false" if not options.compile_parity else ""
        found = parity(
            pool,
            options.gpus,
            layouts,
            steps=options.parity_steps,
            extra=extra,
            precisions=options.precisions,
            deadline=deadline,
        )
        yield from (("parity", result) for result in found)
    elif part == "small":
        yield from (("small", result) for result in small_models(pool, options, deadline))
    elif part == "speed":
        yield from (("speed", result) for result in speed(pool, options, layouts, deadline))
    else:
        yield from models(pool, options, deadline)


def _list(options: argparse.Namespace) -> int:
    """Print what the part ``models`` would measure, with the planner's predictions; needs no GPU."""
    from benchmarks.big_models import Planner, left_out, targets
    from hpjob.core.errors import HpjobError

    planner = Planner(options.gpus, options.machine)
    for target in targets(options.gpus, tiny=options.tiny, whole=options.share < 1):
        try:
            chosen = planner.choose(target, options.share)
        except HpjobError as error:
            print(f"{target.work.name}: {target.name}: {error.message}")
            continue
        figures = f"{chosen.predicted_s:.2f} s, {chosen.predicted_gib:.0f} GiB, {100 * chosen.share:.0f} % of the batch"
        print(f"{target.work.name}: {target.name}: {chosen.case.plan.summary}, {chosen.layout.recompute}: {figures}")
    print(f"left out, they need more GPUs: {', '.join(left_out(options.gpus)) or 'none'}")
    return 0


def _start_runs(checks: ThreadPoolExecutor) -> list[tuple[str, Any]]:
    from benchmarks.run_checks import checkpoint_across_meshes, kill_one_rank

    folder = Path(tempfile.mkdtemp(prefix="hpjob-runs-"))
    (folder / "meshes").mkdir()
    (folder / "kill").mkdir()
    return [
        ("checkpoint", checks.submit(checkpoint_across_meshes, folder / "meshes")),
        ("kill", checks.submit(kill_one_rank, folder / "kill")),
    ]


def _results(pending: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    while pending:
        name, future = pending.pop(0)
        yield name, _result(future)


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
    parser.add_argument(
        "--cases",
        nargs="+",
        help="layouts whose name (with the model's before it) contains a text; in speed, 8192:TEXT = at that length",
    )
    parser.add_argument("--once", action="store_true", help="speed without a second measurement of one GPU")
    parser.add_argument("--layers", type=int, default=16, help="decoder layers (default: %(default)s)")
    parser.add_argument("--sequences", type=int, nargs="+", default=[2048, 8192, 32768], help="tokens of a sequence")
    parser.add_argument("--tokens-per-gpu", type=int, default=32768, help="tokens of a step (default: %(default)s)")
    parser.add_argument("--microbatch-tokens", type=int, default=16384, help="of a GPU (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps, medians (default: %(default)s)")
    parser.add_argument(
        "--warm-up",
        type=int,
        default=8,
        help="steps of speed before them, at least 1; GPUs that have just been idle are faster (default: %(default)s)",
    )
    parser.add_argument("--parity-steps", type=int, default=10, help="steps of a parity case (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="add the kernels of a step to every speed")
    parser.add_argument(
        "--peers", nargs="+", choices=("torchtitan",), default=[], help="measured over the GPUs as well"
    )
    parser.add_argument("--compile-parity", action="store_true", help="parity with compiled layers")
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"], help="of parity")
    parser.add_argument("--share", type=float, default=1.0, help="of a model's batch, same microbatches (default: all)")
    parser.add_argument("--machine", default="hgx-h200", help="kind of node, for predictions (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the layouts of the models and end")
    parser.add_argument(
        "--budget-s", type=float, default=1e9, help="start nothing that would end later than so many seconds"
    )
    parser.add_argument("--patience-s", type=float, default=120.0, help="longest time of one layout")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="nccl or gloo")
    parser.add_argument("--tiny", action="store_true", help="a toy shape in place of the 7B one")
    parser.add_argument(
        "--out", type=Path, default=Path("multi_gpu.json"), help="file of the results, or a folder for it"
    )
    parser.add_argument("--table", type=Path, help="print the table of this file and end")
    options = parser.parse_args(arguments)
    if options.warm_up < 1:
        parser.error("--warm-up: the first step compiles, so it cannot be timed")
    return options


if __name__ == "__main__":
    sys.exit(main())
