"""fp32 master weights beside bf16 compute weights, where no data parallelism needs FSDP2 to hold them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class MasterWeight:
    """The fp32 value of a weight that is computed with in bf16, and the fp32 sum of its gradients.

    Attributes:
        value: What the optimizer updates; the compute weight is its rounded copy.
        needs_single: Its gradient is summed over ranks, so it must not stay in bf16.
        gradient: Sum over the microbatches so far; of one microbatch alone it stays in bf16, which loses
            nothing because that is what the backward pass made.
    """

    value: Tensor
    needs_single: bool = False
    gradient: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        """Add the gradient of one microbatch; it may be kept and must not be changed afterwards."""
        if self.gradient is None:
            self.gradient = gradient.float() if self.needs_single else gradient
            return
        if self.gradient.dtype is not torch.float32:
            self.gradient = self.gradient.float()
        self.gradient.add_(gradient)
