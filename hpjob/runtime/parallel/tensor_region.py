"""The two edges of a tensor-parallel region, with or without the sequence split outside of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hpjob.runtime.parallel.collectives import copy_to_group, reduce_from_group
from hpjob.runtime.sequence.split_gather import (
    BlockInput,
    SequenceLinearSettings,
    gather_sequence,
    reduce_scatter_sequence,
)
from hpjob.runtime.weight_gradients import DeferWeightGradients


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRegion:
    """How activations enter and leave layers that are cut over the tensor-parallel group.

    Attributes:
        mesh: The tensor-parallel axis.
        splits_sequence: Outside the region each rank holds one part of the sequence (``split_gather``, ``ring``)
            instead of a copy of all of it. Parameters used there then get this rank's share of their gradient only.
        is_ring: The cut layers of a block pass the parts around a ring while they multiply (``ring``).
        gathers_first: A split sequence is whole before it is multiplied, for products that cannot be made in parts.
    """

    mesh: DeviceMesh
    splits_sequence: bool = False
    is_ring: bool = False
    gathers_first: bool = False

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @property
    def size(self) -> int:
        return int(self.mesh.size())

    @property
    def rank(self) -> int:
        return int(self.mesh.get_local_rank())

    @property
    def multiplies_while_gathering(self) -> bool:
        """Whether a block's first linears gather the sequence themselves."""
        return self.splits_sequence and self.size > 1 and not self.gathers_first

    @property
    def multiplies_while_splitting(self) -> bool:
        """Whether a block's last linear scatters the sequence itself; the compiler is shown each step of that."""
        return self.multiplies_while_gathering and not torch.compiler.is_compiling()

    def linear_settings(
        self, defer: DeferWeightGradients | None, block: BlockInput | None = None
    ) -> SequenceLinearSettings:
        """Return how such a linear communicates.

        Args:
            defer: Receives the computation of its weight gradients.
            block: Of both edges of a block.
        """
        return SequenceLinearSettings(group=self.group, is_ring=self.is_ring, defer_weight_gradients=defer, block=block)

    def enter(self, hidden: Tensor) -> Tensor:
        """Give every rank the whole sequence; backward, sum what the ranks send back."""
        if self.splits_sequence and self.size > 1:
            return gather_sequence(hidden, self.group)
        return copy_to_group(hidden, self.group)

    def leave(self, partial: Tensor) -> Tensor:
        """Sum over the ranks, (batch, seq, width), and keep all of it or this rank's part of the sequence."""
        if self.splits_sequence and self.size > 1:
            return reduce_scatter_sequence(partial, self.group)
        return reduce_from_group(partial, self.group)
