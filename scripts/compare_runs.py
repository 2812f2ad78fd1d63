#!/usr/bin/env python3
"""Compares two runs bit for bit: every step's figures, and all tensors of the newest checkpoints.

    scripts/compare_runs.py RUN_A RUN_B

Prints the first difference of each kind and exits 1 if there is any. Layouts may differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from hpjob.core.run_dir import RunDir
from hpjob.runtime.checkpoint.folder import CheckpointFolder
from hpjob.runtime.checkpoint.manifest import DATA_NAME

FIGURES = ("loss", "grad_norm", "lr", "tokens")


def compare_metrics(run_a: RunDir, run_b: RunDir) -> str | None:
    """Return the first difference between two metrics files, or None."""
    lines_a, lines_b = (
        [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()] for run in (run_a, run_b)
    )
    for run, lines in ((run_a, lines_a), (run_b, lines_b)):
        steps = [line["step"] for line in lines]
        if steps != list(range(1, len(steps) + 1)):
            wrong = next(index for index, step in enumerate(steps, start=1) if step != index)
            return f"{run.metrics}: line {wrong} has step {steps[wrong - 1]}; steps are doubled or missing"
    for line_a, line_b in zip(lines_a, lines_b, strict=False):
        for name in FIGURES:
            # As text, so that equal NaNs are equal and 0.0 differs from -0.0.
            if repr(line_a[name]) != repr(line_b[name]):
                return f"step {line_a['step']}: {name} is {line_a[name]!r} and {line_b[name]!r}"
    if len(lines_a) != len(lines_b):
        return f"the runs have {len(lines_a)} and {len(lines_b)} steps"
    return None


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint's data folder in full, whatever layout wrote them."""
    reader = FileSystemReader(path)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith("random.")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one process is what is wanted here
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def compare_checkpoints(run_a: RunDir, run_b: RunDir) -> str | None:
    """Return the first difference between the newest checkpoints of two runs, or None."""
    folders = [CheckpointFolder(run) for run in (run_a, run_b)]
    steps = [max(folder.steps(), default=None) for folder in folders]
    if steps[0] is None or steps[0] != steps[1]:
        return f"the newest checkpoints are of steps {steps[0]} and {steps[1]}"
    first, second = (read_tensors(folder.complete(steps[0]) / DATA_NAME) for folder in folders)
    for name in sorted(first.keys() | second.keys()):
        if name not in first or name not in second:
            return f"{name} is only in {(run_a if name in first else run_b).path}"
        a, b = (tensors[name].reshape(-1).view(torch.uint8) for tensors in (first, second))
        if not torch.equal(a, b):
            delta = (first[name].double() - second[name].double()).abs().max().item()
            return f"{name} differs by up to {delta:.3g}"
    return None


def main() -> int:
    """Compare two runs; return the exit code."""
    parser = argparse.ArgumentParser(description="Compare two runs bit for bit.")
    parser.add_argument("run_a", type=Path)
    parser.add_argument("run_b", type=Path)
    options = parser.parse_args()
    run_a, run_b = RunDir(options.run_a), RunDir(options.run_b)
    found = False
    for kind, compare in (("metrics", compare_metrics), ("checkpoint", compare_checkpoints)):
        difference = compare(run_a, run_b)
        found |= difference is not None
        print(f"{kind}: {difference or 'equal'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
