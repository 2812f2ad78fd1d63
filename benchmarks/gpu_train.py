#!/usr/bin/env python
"""Speed of hpjob's runtime on one GPU beside its peers, on the same work in one call.

    benchmarks/gpu_train.py --seq 2048 --rounds 2 --out benchmarks/results/gpu_train-2048.json
    benchmarks/gpu_train.py --table benchmarks/results/gpu_train-2048.json benchmarks/results/gpu_train-8192.json

The work: 8 layers of the Llama-2-7B shape, vocabulary 32,000, 16,384 tokens a step, AdamW and clipping included; or
the whole model with --layers 32 --seq 4096 --tokens 32768 --microbatches 8, or --shape llama3-8b.
Variants take turns for several rounds. Each is built, warmed up, timed step by step and freed. tokens/s come from
the median step; model FLOPs count every weight of a matrix product six times a token and causal attention once;
MFU is their share of 989.5 TFLOP/s, the data sheet's dense bf16. The sustained rate is that of one wide product
run for seconds, at the start and at the end: the card is then limited by its power, as in training.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

HPJOB = {
    "hpjob": "",
    "hpjob, two microbatches": "num_microbatches=2",
    "hpjob, fp8": "use_fp8=true",
    "hpjob, not compiled": "enable_jit_fused=false",
    "hpjob, no attention package": "",
}
SHAPES = ("llama2-7b", "llama3-8b")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or print the table of earlier measurements."""
    options = _options(arguments)
    if options.table:
        from benchmarks.tables import gpu_train_table

        print(gpu_train_table([json.loads(path.read_text()) for path in options.table]))
        return 0
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port))
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    record = _measure(options)
    dist.destroy_process_group()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    from benchmarks.workload import sustained_tflops

    record: dict[str, Any] = {
        "seq": options.seq,
        "layers": options.layers,
        "shape": options.shape,
        "tokens": options.tokens,
        "microbatches": options.microbatches,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sustained_tflops": [sustained_tflops()],
        "variants": {},
    }
    for turn in range(options.rounds):
        for name in options.variants:
            entry = _one(name, options, profile=options.profile and turn == 0)
            record["variants"].setdefault(name, []).append(entry)
            print(json.dumps({name: {k: v for k, v in entry.items() if k != "step_s"}}), flush=True)
    record["sustained_tflops"].append(sustained_tflops())
    print("sustained", record["sustained_tflops"], flush=True)
    return record


def _one(name: str, options: argparse.Namespace, *, profile: bool) -> dict[str, Any]:
    """Build, warm up, time and free one variant."""
    import torch

    from benchmarks.measure import GIB, profile_step, seconds_of
    from benchmarks.workload import PEAK_TFLOPS, flops_per_token

    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    case = _case(HPJOB.get(name, ""), options)
    _offer_attention_packages(name != "hpjob, no attention package")
    try:
        step = _hpjob(case) if name in HPJOB else _peer(name, case)
        for _ in range(4):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        seconds = [seconds_of(step, torch.device("cuda", 0)) for _ in range(options.steps)]
        tokens = case.plan.global_batch_size * case.plan.seq_length / median(seconds)
        tflops = tokens * flops_per_token(case) / 1e12
        entry = {
            "step_s": seconds,
            "tokens_per_s": tokens,
            "tflops": tflops,
            "mfu": tflops / PEAK_TFLOPS,
            "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        }
        return entry | ({"profile": profile_step(step)} if profile else {})
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:800]}


def _case(extra: str, options: argparse.Namespace) -> Any:
    from benchmarks.workload import LLAMA3_8B, LLAMA_7B, work_case

    words = dict(pair.split("=") for pair in extra.split())
    microbatches = int(words.pop("num_microbatches", options.microbatches))
    settings = {
        "num_hidden_layers": options.layers,
        "seq_length": options.seq,
        "precision": "bf16",
        "num_microbatches": microbatches,
        "microbatch_size": options.tokens // options.seq // microbatches,
        **words,
    }
    shape = LLAMA_7B if options.shape == "llama2-7b" else LLAMA3_8B
    return work_case("zero_stage=0", shape, settings, world=1)


def _hpjob(case: Any) -> Callable[[], Any]:
    import torch

    from benchmarks.measure import QuickEngine, random_batch
    from hpjob.runtime.mesh import build_mesh

    device = torch.device("cuda", 0)
    engine = QuickEngine(case.plan, case.recipe, build_mesh(case.plan, "cuda"), device)
    batches = [random_batch(case, device, seed) for seed in range(4)]
    count = [0]

    def step() -> Any:
        count[0] += 1
        return engine.train_step(batches[count[0] % 4], count[0])

    return step


def _peer(name: str, case: Any) -> Callable[[], Any]:
    import torch

    from benchmarks.measure import random_batch
    from benchmarks.peers import PEERS

    train = PEERS[name](case)
    batches = [random_batch(case, torch.device("cuda", 0), seed).input_ids for seed in range(4)]
    count = [0]

    def step() -> Any:
        count[0] += 1
        return train(batches[count[0] % 4])

    return step


def _offer_attention_packages(wanted: bool) -> None:
    """Let the runtime find flash-attn-4 where it is, or hide it, to compare with what torch itself has."""
    from hpjob.runtime.sequence import backend_choice, flash_attn_4

    backend_choice.has_flash_attn_4 = flash_attn_4.has_flash_attn_4 if wanted else lambda: False  # type: ignore[assignment]
    backend_choice._choose_once.cache_clear()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = ["hpjob", "torchtitan", "transformers + torch.compile", "transformers as the Trainer runs it"]
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="decoder layers (default: %(default)s)")
    parser.add_argument("--shape", choices=SHAPES, default=SHAPES[0], help="of a layer (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=16384, help="of a step (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=1, help="of a step (default: %(default)s)")
    parser.add_argument("--variants", nargs="+", default=everything, help=f"also {', '.join(HPJOB)}")
    parser.add_argument("--rounds", type=int, default=2, help="turns of every variant (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a turn (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="kernels of one step of every variant")
    parser.add_argument("--port", type=int, default=29571, help="of the process group (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("gpu_train.json"), help="file of the results")
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of these files and end")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
