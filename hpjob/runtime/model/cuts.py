"""Which part of every parameter of a stage this rank updates."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.tensor import DTensor, Shard

from hpjob.core.errors import UserInputError
from hpjob.plan.model import Axis
from hpjob.runtime.mesh import Mesh
from hpjob.runtime.model.experts import expert_modules, expert_region, expert_shard_dim
from hpjob.runtime.model.stage import DecoderStage
from hpjob.runtime.parallel.data import parameter_shard_dim
from hpjob.runtime.parallel.linear import SharedHeadLinear
from hpjob.runtime.parallel.region import Region


@dataclass(frozen=True, slots=True)
class Cut:
    """How one parameter is cut.

    Attributes:
        region: The part of the whole tensor that is this rank's to update.
        over_tp: Tensor parallelism cuts it.
        partial_over_tp: Its gradient needs a sum over the tensor-parallel group.
        shard_dim: Dim along which data parallelism cuts what tensor parallelism leaves.
        is_expert: It belongs to experts.
    """

    region: Region
    over_tp: bool
    partial_over_tp: bool
    shard_dim: int = 0
    is_expert: bool = False


def plan_cuts(stage: DecoderStage, mesh: Mesh) -> dict[str, Cut]:
    """Return the region of every parameter of a stage on the meta device, not yet cut over data parallelism.

    Raises:
        UserInputError: A parameter cannot be cut evenly enough to be described.
    """
    shared = {
        id(parameter)
        for module in stage.modules()
        if isinstance(module, SharedHeadLinear)
        for parameter in module.parameters(recurse=False)
    }
    shared |= {id(parameter) for norm in stage.head_norms() for parameter in norm.parameters()}
    router = () if stage.expert_block is None else (f".{stage.expert_block}.",)
    experts = [f"{name}." for name, _ in expert_modules(stage)]
    cuts = {}
    for name, parameter in stage.named_parameters():
        if name.startswith(tuple(experts)):
            dim = expert_shard_dim(name, parameter, int(mesh.experts["expert_shard"].size()))
            region = expert_region(name, parameter, mesh, dim)
            cuts[name] = Cut(region, mesh.degrees.tp > 1, False, dim, is_expert=True)
            continue
        region = Region.whole(tuple(parameter.shape))
        dim = parameter_shard_dim(parameter, mesh.shard_size)
        over_tp = isinstance(parameter, DTensor)
        if isinstance(parameter, DTensor):
            (placement,) = parameter.placements
            if isinstance(placement, Shard):
                region = region.chunk(placement.dim, mesh.degrees.tp, mesh.coordinate(Axis.TP))
                _refuse_doubly_uneven(name, parameter, placement.dim, dim, mesh)
        region = region.chunk(dim, mesh.shard_size, mesh.shard_rank)
        used_on_a_part = stage.region.splits_sequence and not over_tp and not any(part in name for part in router)
        partial = id(parameter) in shared or used_on_a_part
        cuts[name] = Cut(region, over_tp, partial, dim)
    return cuts


def _refuse_doubly_uneven(name: str, parameter: DTensor, tp_dim: int, dp_dim: int, mesh: Mesh) -> None:
    both = mesh.degrees.tp * mesh.shard_size
    if tp_dim == dp_dim and mesh.shard_size > 1 and parameter.shape[tp_dim] % both:
        raise UserInputError(
            f"{name} of shape {tuple(parameter.shape)} cannot be cut over tp {mesh.degrees.tp} and then over "
            f"{mesh.shard_size} data-parallel shards",
            hint=f"use zero_stage 0, a hidden_size that divides by {mesh.shard_size}, "
            f"or a vocab_size that divides by {both}",
        )
