#!/usr/bin/env python
"""Train layouts beside one plain process and print how far they are apart.

Each case trains a small model on as many processes as its degrees need, and the same model in one
process with plain transformers and torch, from the same weights and data. One JSON line a case::

    scripts/parity.py --case 'tp_size=2 pp_size=2 zero_stage=1 precision=fp32' --world 8

``--model`` names the family: llama, mistral, qwen2, qwen3, gemma, mixtral, qwen3_moe; a case may name
its own with ``model_type``. ``loss_rel`` is the largest relative difference of the loss over all steps,
``tail_loss_rel`` that of the mean over the last 20, ``grad_rel`` that of all gradients together at step 1,
``weight_rel`` that of all weights after the last step. The last line on standard error says how many cases
are ok; exit code 1 unless all are. A case that the runtime refuses is not ok and prints the reason.

The whole grid, 20 steps a case, and long runs in bf16::

    scripts/parity.py --world 8 --grid tests/runtime/engine/grid.yaml --grid tests/runtime/engine/pairwise.yaml
    scripts/parity.py --world 4 --grid tests/runtime/engine/bf16.yaml --steps 100
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

TIMEOUT_S = 1200.0
"""Of one case: a busy host may need minutes for it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases and return the exit code."""
    options = _options(arguments)

    import torch

    from hpjob.runtime.parity.compare import Outcome
    from hpjob.runtime.parity.run import run_cases
    from hpjob.runtime.process_pool import ProcessPool

    torch.set_num_threads(1)
    lines = [*options.case, *(line for path in options.grid for line in _grid(path))]
    backend = "nccl" if options.device == "cuda" else "gloo"
    outcomes: list[Outcome] = []
    with ProcessPool(options.world, backend=backend, timeout_s=options.timeout_s) as pool:
        for outcome in run_cases(pool, lines, steps=options.steps, model_type=options.model, broken=options.broken):
            outcomes.append(outcome)
            print(json.dumps(outcome.as_json()), flush=True)
    # Not among the lines that programs read.
    print(f"{sum(outcome.ok for outcome in outcomes)} of {len(outcomes)} cases ok", file=sys.stderr)
    return 0 if outcomes and all(outcome.ok for outcome in outcomes) else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--case", action="append", default=[], help="key=value pairs; may be given several times")
    parser.add_argument("--grid", action="append", default=[], type=Path, help="YAML list of cases; several times too")
    parser.add_argument("--model", default="llama", help="model family (default: %(default)s)")
    parser.add_argument("--world", type=int, default=8, help="processes to fill (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help="of one case (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="gloo or nccl (default: %(default)s)")
    parser.add_argument(
        "--break",
        dest="broken",
        choices=(
            "drop-tp-allreduce",
            "mean-of-means",
            "drop-partial-sum",
            "zigzag-order",
            "unscaled-accumulation",
            "double-tied-weight",
        ),
        help="self-test: train with this fault; parity must then fail",
    )
    options = parser.parse_args(arguments)
    if not options.case and not options.grid:
        parser.error("give --case or --grid")
    return options


def _grid(path: Path) -> list[str]:
    import yaml

    document = yaml.safe_load(path.read_text())
    entries = document.get("cases", []) if isinstance(document, dict) else document
    return [
        entry if isinstance(entry, str) else " ".join(f"{key}={value}" for key, value in entry.items())
        for entry in entries
    ]


if __name__ == "__main__":
    sys.exit(main())
