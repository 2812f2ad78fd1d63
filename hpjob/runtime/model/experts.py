"""Mixture-of-experts blocks of a stage: experts spread over ep and tp, and where each part of them lies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hpjob.plan.model import Axis
from hpjob.runtime.mesh import Mesh
from hpjob.runtime.model.families import Family
from hpjob.runtime.moe.expert_parallel import ExpertParallelExperts, replace_experts
from hpjob.runtime.parallel.region import Region
from hpjob.runtime.parallel.tensor_region import TensorRegion
from hpjob.runtime.sequence.split_gather import gather_sequence_replicated, split_sequence

_INTERMEDIATE_DIM = 2
"""Of (experts, gate or up, intermediate, hidden) and of (experts, hidden, intermediate)."""
_DIMS_OF_GATE_AND_UP = 4


def place_experts(layers: nn.Module, family: Family, mesh: Mesh, region: TensorRegion) -> None:
    """Spread the experts of decoder layers on the meta device, in place; nothing for a family without them."""
    if family.expert_block is None:
        return
    replace_experts(layers, mesh.experts["ep"].get_group(), region.group if region.size > 1 else None)
    if region.is_split:
        for layer in layers.children():
            _give_whole_sequences(layer.get_submodule(family.expert_block), region)


def _give_whole_sequences(block: nn.Module, region: TensorRegion) -> None:
    """All tensor-parallel ranks route the same tokens, so their router's gradient is whole on each of them."""

    def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (region.as_sequences(gather_sequence_replicated(args[0], region.group)), *args[1:])

    def split(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        return split_sequence(region.as_row(output), region.group)

    block.register_forward_pre_hook(gather)
    block.register_forward_hook(split)


def expert_modules(stage: nn.Module) -> Iterator[tuple[str, ExpertParallelExperts]]:
    """Yield the experts of a stage with their names."""
    for name, module in stage.named_modules():
        if isinstance(module, ExpertParallelExperts):
            yield name, module


def expert_shard_dim(name: str, parameter: Tensor, shards: int) -> int:
    """Return the dim along which data parallelism cuts an expert weight.

    Whole experts are cheapest to exchange. Where their number is no multiple of the shards, some ranks would have more
    of them than others, or all of one: each expert is cut along its hidden features then, if they can be.

    Args:
        name: ``…gate_up_proj`` or ``…down_proj``.
        parameter: Before this cut.
        shards: Ranks that hold the same experts.
    """
    hidden = 2 if name.endswith("gate_up_proj") else 1
    return 0 if parameter.shape[0] % shards == 0 or parameter.shape[hidden] % shards else hidden


def expert_region(name: str, parameter: Tensor, mesh: Mesh, shard_dim: int) -> Region:
    """Return the part of an expert weight that this rank updates.

    Gate and up lie behind one another in one parameter, of which tensor parallelism cuts each: the region is one of
    (experts, 2, intermediate, hidden) then, whose memory is that of (experts, 2 * intermediate, hidden).

    Args:
        name: ``…gate_up_proj`` or ``…down_proj``.
        parameter: This rank's part before data parallelism cuts it.
        mesh: With axes for experts.
        shard_dim: From :func:`expert_shard_dim`.
    """
    axes, tp = mesh.experts, mesh.degrees.tp
    experts = parameter.shape[0] * mesh.degrees.ep
    shape: tuple[int, ...]
    if name.endswith("gate_up_proj"):
        shape = (experts, 2, parameter.shape[1] // 2 * tp, parameter.shape[2])
    else:
        shape = (experts, parameter.shape[1], parameter.shape[2] * tp)
    region = Region.whole(shape).chunk(0, mesh.degrees.ep, axes["ep"].get_local_rank())
    region = region.chunk(_INTERMEDIATE_DIM, tp, mesh.coordinate(Axis.TP))
    shard = axes["expert_shard"]
    return region.chunk(_region_dim(shard_dim, region), int(shard.size()), shard.get_local_rank())


def expert_placements(mesh: Mesh, region: Region, shard_dim: int) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return how checkpoints describe what :func:`expert_region` says."""
    axes = mesh.experts["expert_replicate", "ep", "expert_shard", "tp"]
    return axes, (Replicate(), Shard(0), Shard(_region_dim(shard_dim, region)), Shard(_INTERMEDIATE_DIM))


def _region_dim(dim: int, region: Region) -> int:
    """Where a region tells gate and up apart, what comes behind them is one dim further on than in memory."""
    return dim + 1 if dim and len(region.shape) == _DIMS_OF_GATE_AND_UP else dim
