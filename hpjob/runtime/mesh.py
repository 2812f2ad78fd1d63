"""The mesh of ranks: axes ``pp, dp, sp, tp``, outermost first, rank-major.

Views of the same ranks, which share their process groups. ``device_mesh`` has the axes of the plan.
``parameter_mesh`` re-divides dp·sp into ``replicate`` and ``shard``, the axes over which parameters are copied and
split: ZeRO-0 replicates over all of dp·sp, the other stages shard over all of it, or over groups
of ``zero_shard_size`` neighbours of which each holds everything once. ``weight_mesh`` has the same axes in the order
in which a parameter is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hpjob.core.errors import UserInputError
from hpjob.plan.model import Axis, ParallelDegrees, Plan
from hpjob.runtime.process_groups import ProcessGroups, Traffic

_LAYERS: Traffic = "layers"
_PARAMETERS: Traffic = "parameters"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """Groups and coordinates of this rank."""

    degrees: ParallelDegrees
    groups: ProcessGroups
    device_mesh: DeviceMesh
    """Axes pp, dp, sp, tp."""
    parameter_mesh: DeviceMesh
    """Axes pp, replicate, shard, tp."""
    weight_mesh: DeviceMesh
    """Axes pp, replicate, tp, shard."""
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

    def pipeline_group(self, members: Sequence[int]) -> dist.ProcessGroup | None:
        """Return a group inside every pipeline; a collective call of all ranks of the world.

        Args:
            members: Positions on the pp axis.

        Returns:
            The group of this rank's pipeline, or None where this rank is not in it.
        """
        return self.groups.get(self._pipeline_rows(members), "parameters")

    def message_groups(self, axis: Axis, count: int) -> list[dist.ProcessGroup]:
        """Return groups along an axis whose messages do not wait for one another; a collective call of all ranks.

        Args:
            axis: Whose ranks send to each other.
            count: How many; with gloo all are one.
        """
        rows = self._ranks_of_plan().movedim(list(Axis).index(axis), -1).flatten(0, -2).tolist()
        return [group for group in self.groups.for_messages(rows, count) if group is not None]

    def _ranks_of_plan(self) -> torch.Tensor:
        return torch.arange(self.world_size).view([self.size(axis) for axis in Axis])

    def _pipeline_rows(self, members: Sequence[int]) -> list[list[int]]:
        stride = self.world_size // self.degrees.pp
        return [[position * stride + row for position in members] for row in range(stride)]

    @property
    def tp_mesh(self) -> DeviceMesh:
        """The tensor-parallel axis as parameters see it."""
        return self.parameter_mesh["tp"]

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """The ranks that share parameters: ``shard``, or ``replicate, shard`` when parameters are copied."""
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
    replicate, shard = _replicate_and_shard(plan, degrees.dp * degrees.sp)
    groups = ProcessGroups(device_type)
    ranks = torch.arange(world)
    axes = {Axis.PP: _PARAMETERS, Axis.DP: _PARAMETERS, Axis.SP: _LAYERS, Axis.TP: _LAYERS}
    by_parameter = ranks.view(degrees.pp, replicate, shard, degrees.tp)
    return Mesh(
        degrees=degrees,
        groups=groups,
        device_mesh=groups.mesh(
            ranks.view(degrees.pp, degrees.dp, degrees.sp, degrees.tp), {a.value: t for a, t in axes.items()}
        ),
        parameter_mesh=groups.mesh(
            by_parameter, {"pp": _PARAMETERS, "replicate": _PARAMETERS, "shard": _PARAMETERS, "tp": _LAYERS}
        ),
        weight_mesh=groups.mesh(
            by_parameter.transpose(2, 3),
            {"pp": _PARAMETERS, "replicate": _PARAMETERS, "tp": _LAYERS, "shard": _PARAMETERS},
        ),
    )


def add_expert_mesh(mesh: Mesh, plan: Plan) -> Mesh:
    """Return the mesh with axes for experts, which re-divide dp·sp; a collective call of all ranks.

    The ranks of an ``ep`` group are neighbours. What is sharded of their experts comes after ep in the order of
    axes, so that a parameter's shards are contiguous chunks of contiguous chunks.
    """
    d = plan.degrees
    _, dense_shard = _replicate_and_shard(plan, d.dp * d.sp)
    shard = max(1, dense_shard // d.ep)
    replicate = d.dp * d.sp // (d.ep * shard)
    ranks = torch.arange(d.world_size).view(d.pp, replicate, shard, d.ep, d.tp).transpose(2, 3)
    axes = {
        "pp": _PARAMETERS,
        "expert_replicate": _PARAMETERS,
        "ep": _LAYERS,
        "expert_shard": _PARAMETERS,
        "tp": _LAYERS,
    }
    return replace(mesh, expert_mesh=mesh.groups.mesh(ranks, axes))


def _replicate_and_shard(plan: Plan, data_ranks: int) -> tuple[int, int]:
    """Return how often parameters are copied over dp·sp, and over how many ranks each copy is sharded."""
    if plan.zero_stage == 0:
        return data_ranks, 1
    shard = plan.zero_shard_size or data_ranks
    return data_ranks // shard, shard
