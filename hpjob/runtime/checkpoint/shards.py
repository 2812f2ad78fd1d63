"""Which part of the state which rank writes: agreed once, since a run's state never changes its shape.

A tensor that several ranks hold is written by one of them, so that each byte is written once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from hpjob.runtime.agreement import scatter_from_rank_zero


class ShardPlan:
    """What this rank writes, and on rank 0 what all ranks write.

    Attributes:
        items: This rank's part.
        metadata: Of the whole checkpoint; rank 0 only.
    """

    def __init__(self, planner: DefaultSavePlanner, plan: SavePlan, metadata: Metadata | None) -> None:
        self._planner = planner
        self._plan = planner.finish_plan(plan)
        self.metadata = metadata

    @classmethod
    def agree(cls, state: Mapping[str, Any]) -> ShardPlan:
        """Plan over all ranks. A collective.

        Raises:
            AgreedError: The states of the ranks do not fit together.
        """
        planner = DefaultSavePlanner()
        metadata: list[Metadata] = []

        def distribute(plans: list[SavePlan]) -> list[SavePlan]:
            parts, found = plan_whole(planner, plans)
            metadata.append(found)
            return parts

        rank = dist.get_rank()
        plan = scatter_from_rank_zero(lambda: plan_locally(planner, state, rank), distribute)
        return cls(planner, plan, metadata[0] if metadata else None)

    @property
    def items(self) -> list[WriteItem]:
        return self._plan.items

    @property
    def plan(self) -> SavePlan:
        return self._plan

    def tensors(self, state: Mapping[str, Any]) -> dict[MetadataIndex, torch.Tensor]:
        """Return the live local tensors that this rank writes, by index."""
        self._planner.state_dict = dict(state)
        return {item.index: self._planner.lookup_object(item.index).detach() for item in self._plan.items}


def plan_locally(planner: DefaultSavePlanner, state: Mapping[str, Any], rank: int) -> SavePlan:
    """Return all that a rank could write."""
    planner.set_up_planner(dict(state), is_coordinator=rank == 0)
    return planner.create_local_plan()


def plan_whole(planner: DefaultSavePlanner, plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Return what each rank is to write, so that everything is written once, and the description of it all."""
    parts, metadata = planner.create_global_plan(plans)
    # The names of the files; which folder they stand in is no part of the plan.
    return FileSystemWriter("unused").prepare_global_plan(parts), metadata


class ResolvedPlanner(DefaultSavePlanner):
    """Hands the writer tensors that were looked up before, live ones or copies.

    Args:
        tensors: By index.
    """

    def __init__(self, tensors: Mapping[MetadataIndex, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """Return the tensor of an item."""
        return self._tensors[index]
