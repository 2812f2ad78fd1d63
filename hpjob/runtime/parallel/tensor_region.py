"""The two edges of a tensor-parallel region, with or without the sequence split outside of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hpjob.runtime.parallel.collectives import copy_to_group, reduce_from_group
from hpjob.runtime.sequence.exchange import SequenceExchange
from hpjob.runtime.sequence.sequence_collectives import unflatten
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
        splits_sequence: Outside the region each rank holds one part of the tokens (``split_gather``, ``ring``)
            instead of a copy of all of them. Parameters used there then get this rank's share of their gradient only.
            The tokens of all sequences lie in one row there, (1, tokens, width), so that a rank's part of it is
            contiguous for any number of sequences: no collective needs a copy before or after it.
        batch: Sequences of a microbatch, into which a split row is cut inside the region.
        is_ring: The cut layers of a block pass the parts around a ring while they multiply (``ring``).
        gathers_first: A split sequence is whole before it is multiplied, for products that cannot be made in parts.
        edges: How compiled layers exchange parts of a split sequence.
    """

    mesh: DeviceMesh
    splits_sequence: bool = False
    batch: int = 1
    is_ring: bool = False
    gathers_first: bool = False
    edges: SequenceExchange | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @property
    def exchange(self) -> SequenceExchange:
        """:attr:`edges`.

        Raises:
            RuntimeError: There are none.
        """
        if self.edges is None:
            raise RuntimeError("no exchange was made for this region")
        return self.edges

    @property
    def size(self) -> int:
        return int(self.mesh.size())

    @property
    def rank(self) -> int:
        return int(self.mesh.get_local_rank())

    @property
    def is_split(self) -> bool:
        """Whether a rank holds only a part of the tokens outside the region."""
        return self.splits_sequence and self.size > 1

    @property
    def multiplies_while_gathering(self) -> bool:
        """Whether a block's first linears gather the sequence themselves."""
        return self.is_split and not self.gathers_first

    @property
    def multiplies_while_splitting(self) -> bool:
        """Whether a block's last linear scatters the sequence itself, and gathers its input for the first ones."""
        return self.multiplies_while_gathering and not torch.compiler.is_compiling()

    def shape_outside(self, length: int, width: int) -> tuple[int, int, int]:
        """Return the shape of activations outside the region, for whole sequences of ``length`` tokens."""
        if self.is_split:
            return 1, self.batch * length // self.size, width
        return self.batch, length, width

    def as_row(self, sequences: Tensor) -> Tensor:
        """View (batch, seq, width) as the row (1, batch * seq, width)."""
        return sequences.flatten(0, 1).unsqueeze(0)

    def as_sequences(self, row: Tensor) -> Tensor:
        """View a whole row (1, batch * seq, width) as (batch, seq, width)."""
        return unflatten(row.squeeze(0), 0, self.batch)

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
        """Give every rank whole sequences, (batch, seq, width); backward, sum what the ranks send back."""
        if self.is_split:
            return self.as_sequences(gather_sequence(hidden, self.group))
        return copy_to_group(hidden, self.group)

    def leave(self, partial: Tensor) -> Tensor:
        """Sum (batch, seq, width) over the ranks and keep all of it or this rank's part of the tokens."""
        if self.is_split:
            return reduce_scatter_sequence(self.as_row(partial), self.group)
        return reduce_from_group(partial, self.group)
