"""fp32 master weights beside the weights that are computed with, where FSDP2 does not hold them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from hpjob.runtime.embedding_rows import WaitingRows


@dataclass(slots=True, weakref_slot=True)
class MasterWeight:
    """The fp32 value of a weight that is computed with in bf16, and the fp32 sum of its gradients.

    Attributes:
        value: What the optimizer updates; the compute weight, or this rank's chunk of it, is its rounded copy or,
            in fp32, may be itself.
        needs_single: Its gradient is summed over ranks, so it must not stay in bf16.
        gradient: Sum over the microbatches so far; of one microbatch alone it may stay in bf16, which loses
            nothing because that is what the backward pass made.
        reduced: The value's chunk of the sum over all ranks, as far as it was reduced.
        home: Memory that the whole sum has to lie in, fp32; None = any.
        waiting: Of an embedding, rows of its gradient that are not in the sum yet.
    """

    value: Tensor
    needs_single: bool = False
    gradient: Tensor | None = None
    reduced: Tensor | None = None
    home: Tensor | None = None
    waiting: WaitingRows = field(default_factory=WaitingRows)

    def add(self, gradient: Tensor) -> None:
        """Add the gradient of one microbatch; it may be kept and must not be changed afterwards."""
        if self.gradient is None and self.home is not None:
            self.gradient = self.home.copy_(gradient)
        elif self.gradient is None:
            self.gradient = gradient.float() if self.needs_single else gradient
        else:
            self.gradient = self.gradient.float().add_(gradient)

    def add_rows(self, ids: Tensor, rows: Tensor, num_rows: int) -> None:
        """Add the gradient that an embedding's weight has of one microbatch, in the end by :meth:`finish`.

        Args:
            ids: (tokens,).
            rows: Gradients of what was looked up, (tokens, width); kept, and must not be changed afterwards.
            num_rows: Of the whole weight.
        """
        if self.waiting.append(ids, rows, num_rows):
            self.finish()

    def finish(self) -> None:
        """Add what waits to the sum; :attr:`gradient` lacks it until then."""
        self.gradient = self.waiting.add_to(self.gradient, self.home)

    def clear(self) -> None:
        """Forget the gradient."""
        self.gradient = self.reduced = None
        self.waiting.clear()

    def add_product(self, gradient: Tensor, inputs: Tensor) -> None:
        """Add the gradient that a linear layer's weight has of one microbatch.

        Where the device adds 16-bit products up in fp32, it is never rounded and takes no memory of its own.

        Args:
            gradient: Of the layer's outputs, (tokens, outputs).
            inputs: (tokens, inputs).
        """
        if multiplies_to_single(gradient.device, gradient.dtype):
            self.gradient = add_single_product(self.gradient, gradient, inputs, self.home)
        else:
            self.add(gradient.t() @ inputs)


def add_single_product(total: Tensor | None, gradient: Tensor, inputs: Tensor, home: Tensor | None = None) -> Tensor:
    """Return ``total + gradient^T inputs`` in fp32, in the memory of an fp32 total; needs :func:`multiplies_to_single`.

    Args:
        total: None = zero.
        gradient: (tokens, outputs).
        inputs: (tokens, inputs).
        home: What the first sum is written to.
    """
    if total is None and home is not None:
        return torch.mm(gradient.t(), inputs, out_dtype=torch.float32, out=home)
    if total is None:
        return torch.mm(gradient.t(), inputs, out_dtype=torch.float32)
    total = total.float()
    return torch.addmm(total, gradient.t(), inputs, out_dtype=torch.float32, out=total)


@cache
def multiplies_to_single(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device adds products of matrices of a dtype up in an fp32 matrix."""
    part = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        total = torch.mm(part, part, out_dtype=torch.float32)
        torch.addmm(total, part, part, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True
