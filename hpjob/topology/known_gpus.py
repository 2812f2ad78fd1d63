"""From the GPU type that a site wrote into its Gres to a packaged machine."""

from __future__ import annotations

import re

_BY_NAME: tuple[tuple[str, str], ...] = (
    (r"gb200|gb300", "gb200-nvl72"),
    (r"b200|b300", "hgx-b200"),
    (r"h200", "hgx-h200"),
    (r"h100|h800", "hgx-h100"),
    (r"a100.*80|a800", "dgx-a100-80g"),
    (r"a100", "dgx-a100-40g"),
    (r"v100", "dgx-v100"),
    (r"l40s", "pcie-l40s"),
    (r"mi300", "mi300x"),
    (r"mi250", "mi250x"),
)


def machine_for(gpu_type: str | None, num_gpus: int) -> tuple[str | None, tuple[str, ...]]:
    """Return the packaged machine for a Gres type, and notes on what was assumed.

    Args:
        gpu_type: Such as ``a100``, ``nvidia_h100_80gb_hbm3``; None when the site gives no type.
        num_gpus: GPUs of a node; 0 = none.
    """
    if num_gpus == 0:
        return "cpu", ("the nodes have no GPUs: ranks run on CPU cores",)
    if gpu_type is None:
        return None, ("Slurm gives no GPU type: name one with --machine to get estimates",)
    text = gpu_type.lower()
    if re.search(r"(?:^|_)[0-9]g\.[0-9]+gb", text):
        return None, (f"GPU type {gpu_type} is a slice of a GPU (MIG): slices have no links to each other",)
    machine = next((name for pattern, name in _BY_NAME if re.search(pattern, text)), None)
    if machine is None:
        return None, (f"GPU type {gpu_type} is not known: name a machine with --machine to get estimates",)
    if machine == "dgx-v100" and num_gpus == 16:
        machine = "dgx2"
    if machine == "dgx-a100-40g" and "40" not in text:
        return machine, (
            f"GPU type {gpu_type} does not tell its memory; 40 GB assumed (--machine dgx-a100-80g for 80 GB)",
        )
    return machine, (f"GPU type {gpu_type} taken as {machine}; links inside a node are its published ones",)
