"""How a layer puts off its weight gradients, so that a pipeline schedule can fill bubbles with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpjob.runtime.weight_sums import ProductReceiver

DeferWeightGradients = Callable[[Sequence[Tensor], Callable[[], tuple[Tensor, ...]]], None]
"""Called in the backward pass with the weights and a function that computes their gradients. That function is to be
called once, later, in the same order on all ranks that share the layer, since it may communicate; autograd itself
then gives these weights no gradient."""


@dataclass(frozen=True, slots=True)
class GradientTarget:
    """Where a weight gradient goes.

    Attributes:
        parameter: As the layer computes with it; a DTensor's local part is meant.
        rows: Rows that were computed with; None = all.
    """

    parameter: nn.Parameter
    rows: slice | None = None

    def add_product(self, gradient: Tensor, inputs: Tensor) -> None:
        """Add the gradient of a linear layer's weight; (tokens, outputs) and (tokens, inputs)."""
        self.add(gradient.t() @ inputs)

    def add(self, gradient: Tensor) -> None:
        """Add to the parameter's gradient."""
        parameter = self.parameter
        if self.rows is not None:
            whole = torch.zeros_like(parameter)
            whole[self.rows] = gradient
            gradient = whole
        if parameter.grad is not None:
            _local(parameter.grad).add_(gradient)
        else:
            parameter.grad = whole_like(parameter, gradient)


def whole_like(parameter: nn.Parameter, local: Tensor) -> Tensor:
    """Describe this rank's part of a gradient like the parameter."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class WeightGradientQueue:
    """Weight gradients of one pipeline stage that wait for their turn, by microbatch."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Callable[[], None]]] = defaultdict(list)
        self._microbatch = 0

    def open(self, microbatch: int) -> None:
        """Take what the following backward pass puts off as this microbatch's."""
        self._microbatch = microbatch

    def defer_for(self, targets: Sequence[GradientTarget]) -> DeferWeightGradients:
        """Return what a layer calls in its backward pass.

        Args:
            targets: Of the weights that it will name, in that order.
        """

        def defer(_: Sequence[Tensor], compute: Callable[[], tuple[Tensor, ...]]) -> None:
            def run() -> None:
                for target, gradient in zip(targets, compute(), strict=True):
                    target.add(gradient)

            self.put_off(run)

        return defer

    def put_off(self, compute: Callable[[], None]) -> None:
        """Keep what is to be computed with the weight gradients of the microbatch that is open."""
        self._waiting[self._microbatch].append(compute)

    def run(self, microbatch: int) -> None:
        """Compute what a microbatch's backward pass put off."""
        with torch.no_grad():
            for compute in self._waiting.pop(microbatch, []):
                compute()


class PutOffProducts:
    """Leaves products of gradients and inputs to a queue; the tensors must not change until it runs.

    Args:
        queue: Where they wait.
        total: Returns what they are added to; asked in the backward pass, when weights are whole.
    """

    def __init__(self, queue: WeightGradientQueue, total: Callable[[], ProductReceiver]) -> None:
        self._queue = queue
        self._total = total

    def add_product(self, gradient: Tensor, inputs: Tensor) -> None:
        """Add ``gradient^T inputs`` when the queue runs; (tokens, outputs) and (tokens, inputs)."""
        total = self._total()
        self._queue.put_off(lambda: total.add_product(gradient, inputs))
