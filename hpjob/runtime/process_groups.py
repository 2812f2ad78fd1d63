"""Process groups, made once for each set of ranks.

A group is not free: gloo starts threads for it that wake often, NCCL keeps buffers on the GPU. Axes that
hold the same ranks therefore share one, and all axes of size 1 share a group of this rank alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Traffic = Literal["layers", "parameters"]
"""What a group carries: collectives inside layers, or those of parameters and gradients."""

Rows = tuple[tuple[int, ...], ...]
"""Global ranks, increasing, of one group after another, in the order of their first ranks."""


class ProcessGroups:
    """The groups of one run.

    NCCL runs the operations of a communicator one after another. On GPUs, groups of the same ranks are shared
    for one kind of traffic only, so that gathering parameters does not hold up the layers before it.

    Args:
        device_type: ``cpu`` or ``cuda``.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._made: dict[tuple[Rows, Traffic | None], dist.ProcessGroup | None] = {}
        self._alone: dist.ProcessGroup | None = None

    def get(self, rows: Sequence[Sequence[int]], traffic: Traffic) -> dist.ProcessGroup | None:
        """Return the group of the row that this rank is in, or None; a collective call of all ranks of the world.

        Args:
            rows: Disjoint sets of global ranks, the same argument on all ranks.
            traffic: What it is for.
        """
        kept: Rows = tuple(sorted(tuple(sorted(row)) for row in rows))
        if all(len(row) == 1 for row in kept):
            return self._of_this_rank_alone() if (dist.get_rank(),) in kept else None
        key = kept, None if self.device_type == "cpu" else traffic
        if key not in self._made:
            is_world = kept == (tuple(range(dist.get_world_size())),)
            reuses_world = is_world and (self.device_type == "cpu" or traffic == "parameters")
            self._made[key] = dist.group.WORLD if reuses_world else _new_group(kept, self._options(traffic))
        return self._made[key]

    @staticmethod
    def _options(traffic: Traffic) -> dict[str, Any]:
        """Kernels of what layers wait for start before the rest of a product's blocks; parameters have time."""
        if traffic == "parameters" or "nccl" not in dist.get_backend_config():
            return {}
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = True
        return {"backend": "nccl", "pg_options": options}

    def for_messages(self, rows: Sequence[Sequence[int]], count: int) -> list[dist.ProcessGroup | None]:
        """Return groups as of :meth:`get` whose messages do not wait for one another; a collective call likewise.

        Gloo's messages carry tags, so one shared group is enough for all of them; so it is in a rehearsal, where
        nothing is sent.
        """
        if "nccl" not in dist.get_backend_config():
            return [self.get(rows, "layers")] * count
        # A receive that waits on a GPU occupies four of its multiprocessors then; NCCL would take up to 32.
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = 4
        return [_new_group(rows, {"backend": "nccl", "pg_options": options}) for _ in range(count)]

    def along(self, ranks: Tensor, dim: int, traffic: Traffic) -> dist.ProcessGroup:
        """Return the group of this rank along a dim of a mesh of all ranks; a collective call of them.

        Args:
            ranks: Every rank of the world once.
            dim: The dim along which ranks share a group.
            traffic: What it is for.
        """
        group = self.get(ranks.movedim(dim, -1).flatten(0, -2).tolist(), traffic)
        if group is None:
            raise ValueError(f"a mesh of {ranks.numel()} ranks does not hold rank {dist.get_rank()}")
        return group

    def mesh(self, ranks: Tensor, axes: dict[str, Traffic]) -> DeviceMesh:
        """Return a device mesh over shared groups; a collective call of all ranks of the world.

        Args:
            ranks: Every rank of the world once; one dim an axis.
            axes: Name and traffic of every dim.
        """
        # A dim of size 1 may have any stride, and torch 2.11 slices only a mesh whose strides fall.
        ranks = ranks.flatten().view(ranks.shape)
        groups = [self.along(ranks, dim, traffic) for dim, traffic in enumerate(axes.values())]
        return DeviceMesh.from_group(groups, self.device_type, ranks, mesh_dim_names=tuple(axes))

    def _of_this_rank_alone(self) -> dist.ProcessGroup:
        if self._alone is None:
            alone: dist.ProcessGroup = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            self._alone = alone
        return self._alone


def _new_group(rows: Sequence[Sequence[int]], options: dict[str, Any]) -> dist.ProcessGroup | None:
    mine = None
    # Names of groups that only their members make depend on how many each has made before: unsafe here.
    for row in rows:
        group = dist.new_group(list(row), **options)
        if dist.get_rank() in row:
            mine = group
    return mine
