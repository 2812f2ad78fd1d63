"""The mesh of ranks: axes ``pp, dp, sp, tp``, outermost first, rank-major.

Two views of the same ranks. ``device_mesh`` has the axes of the plan. ``parameter_mesh`` re-divides
dp·sp into ``replicate`` and ``shard``, the axes over which FSDP2 copies and splits parameters: ZeRO-0
replicates over all of dp·sp, the other stages shard over all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hpjob.core.errors import UserInputError
from hpjob.plan.model import Axis, ParallelDegrees, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """Groups and coordinates of this rank."""

    degrees: ParallelDegrees
    device_mesh: DeviceMesh
    """Axes pp, dp, sp, tp."""
    parameter_mesh: DeviceMesh
    """Axes pp, replicate, shard, tp."""
    expert_mesh: DeviceMesh | None = None
    """Axes pp, expert_replicate, ep, expert_shard, tp; of models with experts."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return self.degrees.world_size

    @property
    def dp_rank(self) -> int:
        return self.coordinate(Axis.DP)

    @property
    def dp_size(self) -> int:
        return self.degrees.dp

    def coordinate(self, axis: Axis) -> int:
        """Return the position of this rank on an axis."""
        return self.degrees.coordinates(self.rank)[axis]

    def size(self, axis: Axis) -> int:
        """Return the number of ranks along an axis."""
        return int(getattr(self.degrees, axis.value))

    def group(self, axis: Axis) -> dist.ProcessGroup:
        """Return the process group of this rank along an axis."""
        return self.device_mesh.get_group(axis.value)

    def ranks(self, axis: Axis) -> list[int]:
        """Return the global ranks along an axis that share this rank's other coordinates."""
        return dist.get_process_group_ranks(self.group(axis))

    def new_pipeline_group(self, members: Sequence[int]) -> dist.ProcessGroup | None:
        """Make one more group in every pipeline; a collective call of all ranks of the world.

        Args:
            members: Positions on the pp axis.

        Returns:
            The group of this rank's pipeline, or None where this rank is not in it.
        """
        stride = self.world_size // self.degrees.pp
        mine = None
        # Names of groups that only their members make depend on how many each has made before: unsafe here.
        for row in range(stride):
            ranks = [position * stride + row for position in members]
            group = dist.new_group(ranks, **self._message_options())
            if self.rank in ranks:
                mine = group
        return mine

    def new_group_along(self, axis: Axis) -> dist.ProcessGroup:
        """Make a second group like :meth:`group`; a collective call of all ranks of the world."""
        shape = [self.size(other) for other in Axis]
        rows = torch.arange(self.world_size).view(shape).movedim(list(Axis).index(axis), -1).flatten(0, -2).tolist()
        groups: dict[bool, dist.ProcessGroup] = {self.rank in row: dist.new_group(row) for row in rows}
        return groups[True]

    def _message_options(self) -> dict[str, Any]:
        """Let a receive that waits on a GPU occupy four of its multiprocessors; NCCL would take up to 32."""
        if self.device_mesh.device_type != "cuda":
            return {}
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = 4
        return {"backend": "nccl", "pg_options": options}

    @property
    def tp_mesh(self) -> DeviceMesh:
        """The tensor-parallel axis as parameters see it."""
        return self.parameter_mesh["tp"]

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh that FSDP2 takes: ``shard``, or ``replicate, shard`` when parameters are copied."""
        if self.parameter_mesh["replicate"].size() > 1:
            return self.parameter_mesh["replicate", "shard"]
        return self.parameter_mesh["shard"]

    @property
    def expert_fsdp_mesh(self) -> DeviceMesh:
        """What :attr:`fsdp_mesh` is for experts: without ep, which holds different ones."""
        if self.experts["expert_replicate"].size() > 1:
            return self.experts["expert_replicate", "expert_shard"]
        return self.experts["expert_shard"]

    @property
    def experts(self) -> DeviceMesh:
        """The mesh that experts are spread over.

        Raises:
            RuntimeError: :func:`add_expert_mesh` was not called.
        """
        if self.expert_mesh is None:
            raise RuntimeError("this mesh has no axes for experts")
        return self.expert_mesh

    @property
    def shard_rank(self) -> int:
        return int(self.parameter_mesh["shard"].get_local_rank())

    @property
    def shard_size(self) -> int:
        return int(self.parameter_mesh["shard"].size())

    @property
    def replicate_rank(self) -> int:
        return int(self.parameter_mesh["replicate"].get_local_rank())


def build_mesh(plan: Plan, device_type: str) -> Mesh:
    """Build the mesh of a plan over the default process group.

    Args:
        plan: Its degrees must multiply to the world size.
        device_type: ``cpu`` or ``cuda``.

    Raises:
        UserInputError: The world has another size than the plan.
    """
    degrees = plan.degrees
    world = dist.get_world_size()
    if world != degrees.world_size:
        raise UserInputError(
            f"the plan needs {degrees.world_size} ranks "
            f"(pp {degrees.pp} x dp {degrees.dp} x sp {degrees.sp} x tp {degrees.tp}), the job has {world}",
            hint="start as many ranks as the plan has, or plan again for this number",
        )
    data_ranks = degrees.dp * degrees.sp
    replicate, shard = (data_ranks, 1) if plan.zero_stage == 0 else (1, data_ranks)
    shape = (degrees.pp, degrees.dp, degrees.sp, degrees.tp)
    return Mesh(
        degrees=degrees,
        device_mesh=_mesh(device_type, shape, [axis.value for axis in Axis]),
        parameter_mesh=_mesh(
            device_type, (degrees.pp, replicate, shard, degrees.tp), ["pp", "replicate", "shard", "tp"]
        ),
    )


def add_expert_mesh(mesh: Mesh, plan: Plan) -> Mesh:
    """Return the mesh with axes for experts, which re-divide dp·sp; a collective call of all ranks.

    The ranks of an ``ep`` group are neighbours. What FSDP2 shards of their experts comes after ep in the order of
    axes, so that a parameter's shards are contiguous chunks of contiguous chunks.
    """
    d = plan.degrees
    rest = d.dp * d.sp // d.ep
    replicate, shard = (rest, 1) if plan.zero_stage == 0 else (1, rest)
    ranks = torch.arange(d.world_size).view(d.pp, replicate, shard, d.ep, d.tp).transpose(2, 3).contiguous()
    names = ("pp", "expert_replicate", "ep", "expert_shard", "tp")
    return replace(mesh, expert_mesh=DeviceMesh(mesh.device_mesh.device_type, ranks, mesh_dim_names=names))


def _mesh(device_type: str, shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    ranks = torch.arange(dist.get_world_size()).view(*shape)
    return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(names))
