"""Builds what the plugin hands out: process group, mesh, engine, weights, data loader."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from hpjob.plan.model import Axis, Plan
from hpjob.recipe.model import Recipe
from hpjob.runtime.api.model import HybridModel, HybridOptimizer
from hpjob.runtime.api.ranks import Ranks, ranks_of_environment
from hpjob.runtime.engine import Engine
from hpjob.runtime.hugging_face.load import load_weights
from hpjob.runtime.mesh import build_mesh
from hpjob.runtime.rendezvous import stay_on_loopback
from hpjob.runtime.timeouts import Timeouts


def build_model(
    recipe: Recipe, plan: Plan, initial_weights: str | None, *, gathers_logits: bool
) -> tuple[HybridModel, HybridOptimizer]:
    """Join the other ranks where that was not done yet, and build this rank's part. A collective of all ranks.

    Args:
        recipe: Model, optimizer, seed.
        plan: The layout; its world is the process group's.
        initial_weights: Hugging Face folder to start from.
        gathers_logits: Whether outputs have whole logits instead of this tensor-parallel rank's chunk.
    """
    device = _device()
    if not dist.is_initialized():
        _join(ranks_of_environment(), device)
    mesh = build_mesh(plan, device.type)
    engine = Engine(plan, recipe, mesh, device)
    if initial_weights is not None:
        load_weights(Path(initial_weights), recipe.model, engine.parameters)
    model = HybridModel(engine, recipe, plan, gathers_logits=gathers_logits)
    return model, model.optimizer


def make_dataloader(
    plan: Plan,
    dataset: Dataset[Any],
    batch_size: int | None,
    *,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    **kwargs: Any,
) -> DataLoader[Any]:
    """Return a loader of this data-parallel rank's share; ranks of one pipeline, tp and sp group read the same."""
    dp_rank = plan.degrees.coordinates(dist.get_rank())[Axis.DP]
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=plan.degrees.dp, rank=dp_rank, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
    size = batch_size or plan.pipeline.num_microbatches * plan.pipeline.microbatch_size
    return DataLoader(dataset, batch_size=size, sampler=sampler, drop_last=drop_last, **kwargs)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if dist.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    device = torch.device("cuda", ranks_of_environment().local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _join(ranks: Ranks, device: torch.device) -> None:
    timeout = timedelta(seconds=Timeouts.from_env().setup_s)
    stay_on_loopback(ranks.master_addr, os.environ)
    # torchrun keeps a store of its own at that address, which all ranks join as clients.
    is_master = ranks.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(ranks.master_addr, ranks.master_port, ranks.world_size, is_master, timeout, wait_for_workers=False)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
    )
