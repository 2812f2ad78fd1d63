"""Parameters of this rank with everything that optimizer, clipping and checkpoints ask about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hpjob.plan.model import Axis
from hpjob.runtime.mesh import Mesh
from hpjob.runtime.model.cuts import Cut
from hpjob.runtime.model.experts import expert_placements
from hpjob.runtime.model.initial import initial_region
from hpjob.runtime.model.stage import EMBEDDING, DecoderStage
from hpjob.runtime.model.weight_memory import Place, allocate, share_weights
from hpjob.runtime.optimizer.master import MasterWeight
from hpjob.runtime.parallel.own_chunk import OwnChunk
from hpjob.runtime.parallel.region import Region
from hpjob.runtime.parallel.weight_unit import Sharing


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedParameter:
    """One parameter as this rank holds it.

    Attributes:
        name: Global name.
        parameter: What is computed with: the weight itself, or with ``cpu_offload`` an fp32 master shard of FSDP2.
        region: The part of the whole tensor that lies here.
        counted: Whether this rank's copy is the one that counts in sums over the whole mesh.
        partial_over_tp: Its gradient is this rank's share and needs a sum over the tensor-parallel group.
        copied_over_tp: Each rank of that group has the same gradient but for rounding.
        tied_copy: A head on the last stage that is one with the embedding on the first.
        master: fp32 value of a ``parameter`` that is only computed with, or a view of one in fp32; None = ``parameter``
            is the value.
        described: Mesh and placements of the whole tensor, where those of ``parameter`` do not say it.
        chunk: What of ``parameter`` lies in ``master``, where other ranks hold it whole as well.
    """

    name: str
    parameter: nn.Parameter
    region: Region
    counted: bool
    partial_over_tp: bool
    copied_over_tp: bool
    tied_copy: bool
    master: MasterWeight | None = None
    described: tuple[DeviceMesh, tuple[Placement, ...]] | None = None
    chunk: OwnChunk | None = None

    @property
    def decays(self) -> bool:
        """Weight decay acts on matrices, not on norm gains and biases."""
        return len(self.region.shape) > 1

    @property
    def is_embedding(self) -> bool:
        """The token embedding, or the head that is one with it."""
        return self.name == EMBEDDING

    @property
    def local(self) -> Tensor:
        """The fp32 shard itself, which the optimizer updates and checkpoints hold."""
        return self._shaped(_local(self.parameter.detach()) if self.master is None else self.master.value)

    @property
    def weight(self) -> Tensor:
        """:attr:`local`, described as cut like the parameter."""
        as_it_is = self.master is None and self.described is None
        return self.parameter.detach() if as_it_is else self.like(self.local)

    @property
    def whole(self) -> Tensor:
        """What is computed with, as a plain tensor; the gradient's shape until it is reduced."""
        return _local(self.parameter.detach())

    @property
    def compute_weight(self) -> Tensor | None:
        """The rounded copy of :attr:`local` that is computed with; None = there is none beside it."""
        if self.master is None:
            return None
        weight = self.whole
        if self.chunk is not None:
            weight = self.chunk.of(weight) if self.chunk.kept is None else self.chunk.kept
        return None if weight.data_ptr() == self.master.value.data_ptr() else self._shaped(weight)

    @property
    def local_gradient(self) -> Tensor | None:
        """The gradient's shard, or None when nothing reached this parameter."""
        if self.master is not None:
            self.collect_gradient()
            self.master.finish()
            gradient = self.master.gradient if self.master.reduced is None else self.master.reduced
        else:
            gradient = self.parameter.grad
        return None if gradient is None else self._shaped(_local(gradient))

    def collect_gradient(self) -> None:
        """Add what the last backward pass left to the fp32 sum, where this parameter has one."""
        if self.master is not None and self.parameter.grad is not None:
            self.master.add(_local(self.parameter.grad))
            self.parameter.grad = None

    def clear_gradient(self) -> None:
        """Forget the gradient."""
        self.parameter.grad = None
        if self.master is not None:
            self.master.clear()

    def publish(self) -> None:
        """Round the master into the weight that is computed with, after the master changed."""
        if self.chunk is not None:
            self.chunk.finish_exchange()
            self.chunk.is_news = True
        weight = self.compute_weight
        if weight is not None:
            with torch.no_grad():
                weight.copy_(self.local)

    def exchange(self, *, has_changed: bool) -> None:
        """Begin to give other ranks what has changed here, when this weight is the last of those that go together.

        Args:
            has_changed: The weight that is computed with was written, with other ranks' chunks on other ranks.
        """
        if self.chunk is None:
            return
        self.chunk.is_news |= has_changed
        if self.chunk.begin_exchange is not None:
            self.chunk.begin_exchange()

    def like(self, local: Tensor) -> Tensor:
        """Describe another local tensor as cut like this parameter."""
        if self.described is not None:
            shape = torch.Size(self.region.shape)
            return _describe(local, *self.described, shape, torch.empty(shape, device="meta").stride())
        parameter = self.parameter
        if not isinstance(parameter, DTensor):
            return local
        return _describe(local, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())

    def _shaped(self, tensor: Tensor) -> Tensor:
        """The dims that the region tells apart may be one in what is computed with."""
        sizes = self.region.sizes
        return tensor if tuple(tensor.shape) == sizes else tensor.view(sizes)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _describe(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    described = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    if local.device.type != mesh.device_type:
        # torch has moved the tensor to the mesh's device; what the host's memory holds shall stay there.
        described._local_tensor = local
    return described


def materialise(
    stage: DecoderStage,
    cuts: dict[str, Cut],
    mesh: Mesh,
    device: torch.device,
    *,
    seed: int,
    compute_dtype: torch.dtype = torch.float32,
    sharing: Sharing | None = None,
    fill: Fill | None = None,
) -> list[ShardedParameter]:
    """Give a sharded stage memory and its initial weights, one parameter at a time.

    Args:
        stage: On the meta device; after FSDP2 where that shards it.
        cuts: From :func:`hpjob.runtime.model.cuts.plan_cuts`.
        mesh: The mesh of the run.
        device: Where the shards live.
        seed: Seed of the run.
        compute_dtype: Of weights that FSDP2 does not hold; those it holds are fp32 shards.
        sharing: How other ranks share the weights, without FSDP2; None = they do not.
        fill: Makes the values; None = :func:`fill_from_seed`.
    """
    fill = fill or fill_from_seed
    allocate(stage.to(dtype=compute_dtype), device, sharing)
    places = {} if sharing is None else share_weights(stage, cuts, mesh, device, sharing)
    result = []
    for name, (global_name, parameter) in zip(cuts, stage.global_parameters(), strict=True):
        cut = cuts[name]
        tied_copy = global_name == EMBEDDING != name
        copy_number = mesh.experts["expert_replicate"].get_local_rank() if cut.is_expert else mesh.replicate_rank
        first_copy = copy_number == 0
        place = places.get(name)
        result.append(
            ShardedParameter(
                name=global_name,
                parameter=parameter,
                region=cut.region,
                counted=first_copy and (cut.over_tp or mesh.coordinate(Axis.TP) == 0) and not tied_copy,
                partial_over_tp=cut.partial_over_tp,
                copied_over_tp=mesh.size(Axis.TP) > 1 and not (cut.over_tp or cut.partial_over_tp),
                tied_copy=tied_copy,
                master=_master(parameter, place, needs_single=cut.partial_over_tp or global_name == EMBEDDING),
                described=_described(parameter, cut, mesh, is_shared=sharing is not None),
                chunk=None if place is None else place.chunk,
            )
        )
        fill(result[-1], seed=seed, std=stage.shape.initializer_range, gain=stage.norm_start)
        result[-1].publish()
    return result


def _described(
    parameter: nn.Parameter, cut: Cut, mesh: Mesh, *, is_shared: bool
) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    if cut.is_expert:
        return expert_placements(mesh, cut.region, cut.shard_dim)
    if not is_shared:
        return None
    over_tp = parameter.placements[0] if isinstance(parameter, DTensor) else Replicate()
    return mesh.weight_mesh["replicate", "tp", "shard"], (Replicate(), over_tp, Shard(cut.shard_dim))


def _master(parameter: nn.Parameter, place: Place | None, *, needs_single: bool) -> MasterWeight | None:
    if place is not None:
        chunk = place.chunk
        rounded = chunk.of(_local(parameter.detach())) if chunk.kept is None else chunk.kept
        is_value = rounded.dtype is torch.float32 and rounded.is_contiguous()
        value = rounded if is_value else torch.empty(rounded.shape, dtype=torch.float32, device=rounded.device)
        return MasterWeight(value, needs_single=True, home=place.sum_home)
    if parameter.dtype is torch.float32:
        return None
    # A loss scale is divided out of the gradient, which fp16 has no room for.
    needs_single = needs_single or parameter.dtype is torch.float16
    return MasterWeight(torch.empty_like(_local(parameter.detach()), dtype=torch.float32), needs_single)


class Fill(Protocol):
    """Gives a parameter its first values."""

    def __call__(self, item: ShardedParameter, *, seed: int, std: float, gain: float) -> None: ...


def fill_from_seed(item: ShardedParameter, *, seed: int, std: float, gain: float) -> None:
    """Fill a parameter with values that depend on seed, name and global shape only; the CPU makes them."""
    region = item.region
    local = item.local
    initial = initial_region(item.name, region.shape, region.offsets, region.sizes, seed=seed, std=std, gain=gain)
    with torch.no_grad():
        local.copy_(initial)


def fill_quickly(item: ShardedParameter, *, seed: int, std: float, gain: float) -> None:
    """Fill a parameter where it lies with values of the same spread, for runs that only take times."""
    with torch.no_grad():
        item.local.normal_(0.0, std) if item.decays else item.local.fill_(gain)
