"""The measured columns of a row: what predictions are compared with, and nothing that they may use."""

from __future__ import annotations

from dataclasses import dataclass

from hpjob.plan.published.rows import Case, Row, real


@dataclass(frozen=True, slots=True)
class Measured:
    """What a row says was measured."""

    step_s: float | None
    memory_gib: float | None
    memory_counts: str
    """``allocated``, ``reserved`` or ``device``."""
    outcome: str


def measured(row: Row, case: Case) -> Measured:
    """Read the measured columns of a row."""
    step = real(row, "step_time_s")
    rate, tflops = real(row, "tokens_per_gpu_s"), real(row, "tflops_per_gpu")
    if not step and rate:
        step = case.tokens / (rate * case.num_gpus)
    if not step and tflops:
        flops = _published_flops(row, case)
        step = flops / (tflops * 1e12 * case.num_gpus) if flops else None
    kind = row.get("mem_kind", "").lower()
    counts = "device" if "smi" in kind else "allocated" if "alloc" in kind else "reserved"
    return Measured(step, real(row, "peak_mem_gib"), counts, row.get("outcome", "").strip().lower() or "ok")


def _published_flops(row: Row, case: Case) -> float | None:
    """FLOPs of a step under the definition that a row's TFLOP/s follow."""
    definition, s = row.get("tflops_def", ""), case.shape
    layer = s.dense_layer_params * s.num_layers
    attention = 12.0 * s.num_layers * s.hidden * case.layouts[0].seq
    head = 6.0 * s.vocab * s.hidden
    if definition.startswith("hardware_full_recompute"):
        return case.tokens * (8.0 * layer + 4.0 / 3.0 * attention + head)
    if definition.startswith("model_full_attn"):
        return case.tokens * (6.0 * layer + attention + head)
    if definition.startswith("model_causal"):
        return case.tokens * (6.0 * layer + attention / 2 + head)
    return None
