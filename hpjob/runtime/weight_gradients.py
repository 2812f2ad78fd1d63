"""How a layer puts off its weight gradients, so that a pipeline schedule can fill bubbles with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

DeferWeightGradients = Callable[[Sequence[Tensor], Callable[[], tuple[Tensor, ...]]], None]
"""Called in the backward pass with the weights and a function that computes their gradients. That function is to be
called once, later, in the same order on all ranks that share the layer, since it may communicate; autograd itself
then gives these weights no gradient."""
