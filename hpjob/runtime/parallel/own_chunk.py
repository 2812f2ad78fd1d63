"""This rank's chunk of a weight that several ranks compute with, and who has the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hpjob.runtime.mesh import Mesh
from hpjob.runtime.parallel.coalesced import Work, wait_for
from hpjob.runtime.parallel.peer_arena import PeerArena
from hpjob.runtime.parallel.region import chunk_bounds


@dataclass(frozen=True, slots=True)
class SharingRanks:
    """Ranks that hold the same weights.

    Attributes:
        shard: Those that have a chunk each.
        replicate: Those that have the same chunk.
        arena: Where even weights and their sums lie, so that ``shard`` exchanges them by copies; None = by collectives.
    """

    shard: dist.ProcessGroup
    replicate: dist.ProcessGroup
    arena: PeerArena | None = None


def sharing_ranks(mesh: Mesh) -> dict[bool, SharingRanks]:
    """Return who shares experts (True) and all other weights (False)."""

    def along(axes: DeviceMesh, shard: str, replicate: str) -> SharingRanks:
        return SharingRanks(axes.get_group(shard), axes.get_group(replicate))

    found = {False: along(mesh.parameter_mesh, "shard", "replicate")}
    if mesh.expert_mesh is not None:
        found[True] = along(mesh.expert_mesh, "expert_shard", "expert_replicate")
    return found


@dataclass(slots=True)
class OwnChunk:
    """The part of a whole weight that this rank updates: one of ``torch.chunk``.

    Attributes:
        dim: Along which weights are cut.
        begin: First row.
        length: Rows; 0 = there is none left for this rank.
        is_even: Whether all ranks' chunks are equal and lie behind one another.
        ranks: Who has the others.
        is_news: The chunk has changed since the weight was whole.
        exchange: Collectives on their way that read it.
        begin_exchange: Of the last weight of those that are exchanged together: begins that.
        kept: The chunk itself, where the weight is whole only while it is used.
    """

    dim: int
    begin: int
    length: int
    is_even: bool
    ranks: SharingRanks
    is_news: bool = False
    exchange: list[Work] = field(default_factory=list)
    begin_exchange: Callable[[], None] | None = None
    kept: Tensor | None = None

    @classmethod
    def of_shape(cls, shape: Sequence[int], dim: int, ranks: SharingRanks) -> OwnChunk:
        """Return this rank's chunk of a weight of that shape."""
        parts, index = ranks.shard.size(), ranks.shard.rank()
        begin, end = chunk_bounds(shape[dim], parts, index)
        return cls(dim, begin, end - begin, dim == 0 and shape[0] % parts == 0, ranks)

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's chunk of the weight, or of its gradient; a view."""
        return whole.narrow(self.dim, self.begin, self.length)

    def finish_exchange(self) -> None:
        """Wait until the chunk may be written."""
        wait_for(self.exchange)

    def clear_others(self, whole: Tensor) -> None:
        """Set what other ranks have to zero."""
        end = self.begin + self.length
        whole.narrow(self.dim, 0, self.begin).zero_()
        whole.narrow(self.dim, end, whole.shape[self.dim] - end).zero_()
