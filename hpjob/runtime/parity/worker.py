"""What one rank does for a parity case."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
import torch.distributed as dist
from torch import Tensor

from hpjob.runtime.engine import Engine
from hpjob.runtime.mesh import build_mesh
from hpjob.runtime.parallel.region import Region
from hpjob.runtime.parity.case import Case
from hpjob.runtime.parity.data import global_batch, rank_batch
from hpjob.runtime.parity.faults import fault

Part = tuple[str, Region, Tensor]
"""Parameter name, where the part lies in it, the part on the CPU."""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank's share of a trajectory.

    Attributes:
        losses: Of every step; equal on all ranks.
        skipped: Steps that updated nothing because fp16 overflowed.
        gradients: Unclipped, of the first update.
        weights: After the last step.
    """

    losses: list[float]
    skipped: list[int]
    gradients: list[Part]
    weights: list[Part]


def train_case(case: Case, steps: int, broken: str | None) -> RankRecord:
    """Train a case on this rank of the default process group."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    mesh = build_mesh(case.plan, device.type)
    losses: list[float] = []
    skipped: list[int] = []
    gradients: list[Part] = []
    with fault(broken):
        engine = Engine(case.plan, case.recipe, mesh, device)
        for step in range(1, steps + 1):
            whole = global_batch(case.recipe, step, case.documents)
            batch = rank_batch(whole, mesh.dp_rank, mesh.dp_size)
            loss, tokens = engine.accumulate_gradients(batch)
            first = [] if gradients else _gradients(engine)
            result = engine.apply_gradients(loss, tokens, step)
            losses.append(result.loss)
            if isfinite(result.grad_norm):
                gradients = gradients or first
            else:
                skipped.append(step)
    weights = [(p.name, p.region, p.local.cpu().clone()) for p in engine.parameters]
    return RankRecord(losses, skipped, gradients, weights)


def _gradients(engine: Engine) -> list[Part]:
    return [
        (p.name, p.region, p.local_gradient.cpu() / engine.gradient_scale)
        for p in engine.parameters
        if p.local_gradient is not None
    ]
