#!/usr/bin/env python
"""Rates of the attention kernels that hpjob can take, both ways, at the sizes of training.

    benchmarks/attention_kernels.py --out benchmarks/results/attention_kernels.json

32 heads of 128, 16,384 tokens, causal, bf16. Heads lie inside rows, as a projection leaves them; "heads first" is
the same kernel on heads that were copied apart, the copy not counted. Each direction runs for some time on end, for
the card is then limited by its power, as in training. TFLOP/s count half of the score matrix: two products forward,
five backward counted as four. The error is that of the output and gradients against fp32 on the CPU, on a short piece.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

TOKENS, HEADS, HEAD_DIM = 16384, 32, 128
KERNELS = ("cuDNN SDPA", "cuDNN SDPA, heads first", "flash SDPA", "flash-attn-4")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every kernel at every length."""
    options = _options(arguments)
    import torch

    from benchmarks.workload import sustained_tflops

    record: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "sustained_tflops": sustained_tflops(),
        "kernels": [],
    }
    for seq in options.seq:
        for name in options.kernels:
            entry = {"kernel": name, "seq": seq, **_entry(name, seq, options.seconds)}
            record["kernels"].append(entry)
            print(json.dumps(entry), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _entry(name: str, seq: int, seconds: float) -> dict[str, Any]:
    import torch

    try:
        heads_first = name.endswith("heads first")
        q, k, v, grad = _inputs(TOKENS // seq, seq, heads_first, "cuda")
        with _kernel(name) as attend:
            out = attend(q, k, v)
            forward_s = _mean_seconds(lambda: attend(q, k, v), seconds)
            backward_s = _mean_seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), seconds)
            error = _error(attend)
        flops = 2 * TOKENS * seq * HEADS * HEAD_DIM
        return {
            "forward_ms": forward_s * 1e3,
            "backward_ms": backward_s * 1e3,
            "forward_tflops": flops / forward_s / 1e12,
            "backward_tflops": 2 * flops / backward_s / 1e12,
            "error": error,
        }
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:500]}


def _inputs(batch: int, seq: int, heads_first: bool, device: str) -> list[Any]:
    """q, k, v and the output's gradient, all (batch, heads, seq, head_dim)."""
    import torch

    torch.manual_seed(0)
    tensors = [torch.randn(batch, seq, HEADS, HEAD_DIM).to(device, torch.bfloat16).transpose(1, 2) for _ in range(4)]
    if heads_first:
        tensors = [tensor.contiguous() for tensor in tensors]
    return [tensor.requires_grad_(index < 3) for index, tensor in enumerate(tensors)]


@contextmanager
def _kernel(name: str) -> Iterator[Callable[..., Any]]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from hpjob.runtime.sequence.flash_attn_4 import flash_attn_4

    if name == "flash-attn-4":

        def attend(*heads_first: Any) -> Any:
            out, _ = flash_attn_4(*(tensor.transpose(1, 2) for tensor in heads_first), HEAD_DIM**-0.5, True)
            return out.transpose(1, 2)

        yield attend
        return
    if name.startswith("cuDNN"):
        # Below SDPA: in a context that allows this kernel alone, SDPA found none for these tensors (torch 2.11).
        yield lambda q, k, v: torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[0]
        return
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True)


def _mean_seconds(run: Callable[[], Any], seconds: float) -> float:
    import torch

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(10):
            run()
        count += 10
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def _error(attend: Callable[..., Any]) -> float:
    """Largest relative error (by norm) of output and gradients."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v, grad = _inputs(1, 512, False, "cuda")
    out = attend(q, k, v)
    found = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    wide = [tensor.detach().float().cpu().requires_grad_(index < 3) for index, tensor in enumerate((q, k, v, grad))]
    expected_out = scaled_dot_product_attention(*wide[:3], is_causal=True)
    expected = [expected_out, *torch.autograd.grad(expected_out, wide[:3], wide[3])]
    pairs = zip(found, expected, strict=True)
    return max(float((a.detach().float().cpu() - b.detach()).norm() / b.detach().norm()) for a, b in pairs)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, nargs="+", default=[2048, 4096, 8192], help="lengths")
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS, help="(default: all)")
    parser.add_argument("--seconds", type=float, default=0.7, help="of each direction (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("attention_kernels.json"), help="file of the results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
