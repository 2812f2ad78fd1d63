"""Which part of every sequence a rank works on, by sequence parallelism mode, with padding where it does not divide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from hpjob.plan.model import Axis
from hpjob.recipe.model import SequenceParallelismMode
from hpjob.runtime.mesh import Mesh
from hpjob.runtime.sequence.zigzag import zigzag_split

Order = Literal["whole", "contiguous", "zigzag"]
_ORDERS: dict[SequenceParallelismMode | None, Order] = {
    None: "whole",
    "split_gather": "whole",
    "ring": "whole",
    "all_to_all": "contiguous",
    "ring_attn": "zigzag",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceSplit:
    """How a whole sequence becomes what one rank is handed.

    Attributes:
        length: Tokens of a sequence as data gives it.
        parts: Ranks that share a sequence.
        rank: This rank among them.
        order: ``whole`` = every rank is handed all of it; the layers themselves may split it (``TensorRegion``).
    """

    length: int
    parts: int
    rank: int
    order: Order

    @property
    def padded_length(self) -> int:
        """Smallest length >= ``length`` that can be split."""
        unit = self.parts * (2 if self.order == "zigzag" else 1)
        return -(-self.length // unit) * unit

    @property
    def local_length(self) -> int:
        """Tokens of a sequence that this rank is handed."""
        return self.padded_length if self.order == "whole" else self.padded_length // self.parts

    def pad(self, tensor: Tensor, fill: int) -> Tensor:
        """Append ``fill`` to (batch, length). Attention is causal, so no token sees what is appended."""
        missing = self.padded_length - self.length
        return functional.pad(tensor, (0, missing), value=fill) if missing else tensor

    def pad_positions(self, position_ids: Tensor) -> Tensor:
        """Go on counting behind the last position of (batch, length)."""
        missing = self.padded_length - self.length
        if not missing:
            return position_ids
        further = torch.arange(1, missing + 1, device=position_ids.device, dtype=position_ids.dtype)
        return torch.cat([position_ids, position_ids[:, -1:] + further], dim=1)

    def take(self, tensor: Tensor) -> Tensor:
        """Return what this rank is handed of a padded tensor (batch, padded length)."""
        if self.order == "zigzag":
            return zigzag_split(tensor, self.rank, self.parts)
        if self.order == "contiguous":
            return tensor.narrow(1, self.rank * self.local_length, self.local_length).contiguous()
        return tensor


def sequence_split(length: int, mode: SequenceParallelismMode | None, mesh: Mesh) -> SequenceSplit:
    """Return the split of a mode; ``split_gather`` and ``ring`` split over tp, the others over sp."""
    order = _ORDERS[mode]
    axis = Axis.TP if order == "whole" else Axis.SP
    parts = 1 if mode is None else mesh.size(axis)
    return SequenceSplit(length=length, parts=parts, rank=mesh.coordinate(axis), order=order)
