#!/usr/bin/env python
"""Everything worth measuring on some GPUs in one call: steps in the order of worth, each with a limit of its own.

    benchmarks/gpu_session.py one --budget-s 560 --out results/one       # one GPU
    benchmarks/gpu_session.py fp8 --budget-s 150 --out results/fp8       # one GPU, with torchao
    benchmarks/gpu_session.py two --budget-s 560 --out results/two       # two of one host
    benchmarks/gpu_session.py all --gpus 8 --budget-s 560 --out results/all
    benchmarks/gpu_session.py one --dry-run                              # prints the commands

The folder gets ``session.log`` with all output, ``session.json`` with exit code and seconds of every step, and the
files of the measurements. A step that fails or takes too long stops no other; one for which there is no time left is
named and left out. Both files are whole after every step, should the call be cut off.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_ROOT = Path(__file__).resolve().parent.parent
_TAIL_LINES = 4


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command.

    Attributes:
        name: In the report.
        command: ``{out}`` is the folder of results, ``{left}`` the seconds that the step has.
        limit_s: After which it is ended.
        least_s: It is not begun with less; None = half of the limit.
    """

    name: str
    command: str
    limit_s: float
    least_s: float | None = None


_PARITY = (
    "precision=fp32",
    "precision=bf16 enable_jit_fused=true",
    "precision=bf16 enable_jit_fused=true recompute=selective",
    "precision=bf16 documents=3",
    "precision=fp16",
    "precision=bf16 cpu_offload=true zero_stage=1",
    "precision=bf16 model_type=mixtral num_experts=4 num_experts_per_tok=2",
    "precision=bf16 model_type=qwen3 enable_jit_fused=true",
)
_FP8 = "precision=bf16 use_fp8=true hidden_size=64 enable_jit_fused=true"


def one_gpu() -> list[Step]:
    """Return what one GPU can show."""
    cases = " ".join(f"--case {shlex.quote(text)}" for text in _PARITY)
    train = "python benchmarks/gpu_train.py --rounds 1 --steps 6"
    rehearse = "python -m hpjob rehearse --machine hgx-h200 --device cuda"
    return [
        Step(name="topology", command="python -m hpjob topology detect --json", limit_s=30),
        Step(
            name="kernels",
            command="python -m pytest -q -rA -p no:cacheprovider -o filterwarnings=default -k 'cuda or fused' "
            "tests/runtime/sequence/test_block_attention.py tests/runtime/moe",
            limit_s=90,
        ),
        Step(
            name="numbers",
            command=f"python scripts/parity.py --device cuda --world 1 --steps 10 --timeout-s 60 {cases}",
            limit_s=150,
        ),
        Step(
            name="8 layers",
            command=f"{train} --seq 2048 --profile --variants hpjob torchtitan --out {{out}}/8-layers.json",
            limit_s=120,
        ),
        Step(
            name="7B",
            command=f"{train} --layers 32 --seq 4096 --tokens 32768 --microbatches 8 --variants hpjob "
            "--out {out}/7b.json",
            limit_s=90,
        ),
        Step(name="attention", command="python benchmarks/attention_kernels.py --out {out}/attention.json", limit_s=60),
        Step(
            name="rehearse 13B, tp 4",
            command=f"{rehearse} --nodes 1 --recipe 13b --set parallel.tp_size=4 --rank 0 --json",
            limit_s=100,
        ),
        Step(name="rehearse 70B", command=f"{rehearse} --nodes 4 --recipe 70b --rank 0 --json", limit_s=100),
        Step(
            name="rehearse Mixtral", command=f"{rehearse} --nodes 2 --recipe mixtral-8x7b --rank 0 --json", limit_s=75
        ),
        Step(
            name="8B, large vocabulary",
            command=f"{train} --layers 16 --shape llama3-8b --seq 8192 --tokens 16384 --microbatches 2 "
            "--variants hpjob --out {out}/8b.json",
            limit_s=75,
        ),
        Step(
            name="rehearse 70B, all stages",
            command=f"{rehearse} --nodes 4 --recipe 70b --all-stages --json",
            limit_s=320,
        ),
    ]


def fp8() -> list[Step]:
    """Return what one GPU can show of products in 8 bits; needs torchao, which the other steps better do without."""
    # A port of its own: it may run beside another session.
    train = "python benchmarks/gpu_train.py --port 29572 --rounds 2 --steps 6 --seq 2048 --variants hpjob 'hpjob, fp8'"
    parity = "python scripts/parity.py --device cuda --world 1 --steps 40 --timeout-s 60"
    return [
        Step(name="8 layers", command=f"{train} --profile --out {{out}}/fp8.json", limit_s=100),
        Step(name="numbers", command=f"{parity} --case {shlex.quote(_FP8)}", limit_s=60),
    ]


def two_gpus() -> list[Step]:
    """Return what two GPUs can show: every axis alone."""
    command = "python benchmarks/multi_gpu.py --gpus 2 --patience-s 60 --warm-up 4"
    return [
        Step(
            name="numbers",
            command=f"{command} --parts facts parity runs --budget-s 240 --out {{out}}/numbers.json",
            limit_s=270,
        ),
        Step(
            name="speed",
            command=f"{command} --parts speed --sequences 2048 --steps 3 --budget-s {{left}} --out {{out}}/speed.json",
            limit_s=240,
        ),
        Step(name="links", command="python benchmarks/link_curves.py --gpus 2 --out {out}/links.json", limit_s=40),
        Step(
            name="long sequences",
            command=f"{command} --parts speed --sequences 32768 --cases ring_attn all_to_all zbv --steps 2 "
            "--budget-s {left} --out {out}/long.json",
            limit_s=150,
        ),
    ]


def all_gpus(gpus: int, share: float) -> list[Step]:
    """Return what all GPUs of a host can show: whole models."""
    command = f"python benchmarks/multi_gpu.py --gpus {gpus}"
    return [
        Step(
            name="numbers",
            command=f"{command} --parts facts small --precisions bf16 --parity-steps 5 --patience-s 45 --budget-s 100 "
            "--out {out}/small.json",
            limit_s=130,
        ),
        Step(
            name="models",
            command=f"{command} --parts models --share {share:g} --steps 3 --patience-s 90 --budget-s {{left}} "
            "--out {out}/models.json",
            limit_s=900,
            least_s=60,
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a session; exit code 1 if a step failed."""
    options = _options(arguments)
    sessions = {"one": one_gpu, "fp8": fp8, "two": two_gpus}
    steps = sessions.get(options.session, lambda: all_gpus(options.gpus, options.share))()
    if options.dry_run:
        for step in steps:
            print(f"{step.name} (at most {step.limit_s:.0f} s): {step.command}")
        return 0
    return run(steps, options.out, options.budget_s)


def run(steps: Sequence[Step], out: Path, budget_s: float) -> int:
    """Run steps one after the other; exit code 1 if one failed.

    Args:
        steps: In the order of worth.
        out: Folder of all files.
        budget_s: For all of them.
    """
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    report: list[dict[str, object]] = []
    with (out / "session.log").open("wb", buffering=0) as log:
        for step in steps:
            left_s = budget_s - (time.monotonic() - began)
            if left_s < (step.limit_s / 2 if step.least_s is None else step.least_s):
                report.append({"step": step.name, "skipped": f"only {left_s:.0f} s are left"})
            else:
                report.append(_one(step, out, min(step.limit_s, left_s), log))
            print(json.dumps(report[-1]), flush=True)
            (out / "session.json").write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(entry.get("exit_code") for entry in report) else 0


def _one(step: Step, out: Path, limit_s: float, log: IO[bytes]) -> dict[str, object]:
    # Room for what a measurement does after its own budget has ended.
    command = step.command.replace("{out}", str(out.resolve())).replace("{left}", f"{max(5.0, limit_s - 20.0):.0f}")
    words = shlex.split(command)
    words[0] = sys.executable if words[0] == "python" else words[0]
    log.write(f"\n===== {step.name}: {command}\n".encode())
    start = log.tell()
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    process = subprocess.Popen(
        words, cwd=_ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    try:
        code: int | str = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = f"ended after {limit_s:.0f} s"
    finally:
        _end(process)
    seconds = round(time.monotonic() - began, 1)
    with (out / "session.log").open("rb") as written:
        written.seek(start)
        said = written.read().decode(errors="replace").splitlines()
    return {"step": step.name, "exit_code": code, "seconds": seconds, "said": [t[:300] for t in said[-_TAIL_LINES:]]}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a step with the ranks that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("session", choices=("one", "fp8", "two", "all"), help="how many GPUs there are")
    parser.add_argument("--gpus", type=int, default=8, help="of the session 'all' (default: %(default)s)")
    parser.add_argument("--share", type=float, default=0.25, help="of the batch of 'all' (default: %(default)s)")
    parser.add_argument("--budget-s", type=float, default=560.0, help="for the whole session (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("gpu_session"), help="folder of the results")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
