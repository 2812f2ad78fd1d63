"""Weights that several data-parallel ranks compute with, in the dtype of the computation: ZeRO 0 to 3.

Beside each weight lies what the optimizer needs of this rank's chunk: fp32 master, moments and the reduced gradient.
With ZeRO 0 the chunk is all of it.

- Each weight's gradient is a whole fp32 sum. When a backward pass has left a layer, or its deferred gradients are
  there, the layer's sums are reduced beside the rest: with ZeRO 0 and 1 once a step, else after every microbatch.
- The update writes the rounded chunk. With ZeRO 0 to 2 it lies in the weight: when a layer is updated, all ranks begin
  to gather the layer in place, and the next forward pass waits before each layer for that layer's. With ZeRO 3 a layer
  gets memory and is gathered while the one before it is computed, forward and backward, and its memory is given back
  after it, unless it is the next one as well: where passes of a whole model turn round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function

from hpjob.runtime.model.stage import DecoderStage
from hpjob.runtime.parallel.weight_unit import SharedWeight, Sharing, WeightUnit
from hpjob.runtime.weight_gradients import WeightGradientQueue

W = TypeVar("W", bound=SharedWeight)

_AT_ONCE = 3
"""Units whose sums may be on the way before memory counts more than a gap in the computation."""


class SharedWeights(Generic[W]):
    """Reduces the gradients of a stage and makes its weights whole.

    Hooks are those of whole layers, around what is compiled.

    Args:
        stage: With memory.
        items: All its weights.
        sharing: When they are gathered and reduced.
        queue: Of weight gradients that are computed after the backward pass.

    Raises:
        ValueError: A weight is in no unit, so that nothing would reduce its gradient.
    """

    def __init__(
        self, stage: DecoderStage, items: Sequence[W], sharing: Sharing, queue: WeightGradientQueue | None = None
    ) -> None:
        self._queue = queue
        self._reduces_every = sharing.reduces_every
        # With turns (see weight_memory), the memory of a layer's sums is wanted again two layers on.
        self._at_once = 1 if sharing.reduces_every else _AT_ONCE
        on_gpu = bool(items) and items[0].whole.is_cuda
        self._stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        self._reduces, self._is_last = False, False
        self._under_way: deque[WeightUnit] = deque()
        self.in_order: list[W] = []
        """The weights in the order of a forward pass, so that those that are exchanged together follow one another."""
        self._units: list[WeightUnit] = []
        left = {id(item.parameter): item for item in items}
        for modules in _in_forward_order(stage):
            owned = [left.pop(id(p)) for module in modules for p in module.parameters()]
            self.in_order += owned
            self._units.append(WeightUnit(owned, sharing))
            modules[0].register_forward_pre_hook(self._before_forward(len(self._units) - 1), prepend=True)
        self._first_layer = 1 if stage.part.is_first else 0
        self._last_layer = self._first_layer + len(stage.decoder_layers) - 1
        # Passes of one part of a pipeline do not follow one another, and memory counts while it waits.
        self._turns_round = sharing.frees and stage.part.is_first and stage.part.is_last
        if left:
            raise ValueError(f"{len(left)} weights are in no layer")
        if self._turns_round:
            # What a step begins with has nothing before it to hide behind, but the update of all the others.
            for unit in self._units[: self._first_layer + 1]:
                unit.gather_when_updated()
        if sharing.frees:
            for number, layer in enumerate(stage.decoder_layers, self._first_layer):
                layer.register_forward_hook(self._after_forward(number))
            if stage.part.is_first and not (stage.tied and stage.part.is_last):
                stage.model.embed_tokens.register_forward_hook(lambda *_: self._units[0].free())  # type: ignore[union-attr]

    def begin(self, *, reduces: bool, is_last: bool) -> None:
        """Prepare for what computes weight gradients next.

        Args:
            reduces: All gradients of a microbatch are there when it has left a layer.
            is_last: They are the stage's last of this step.
        """
        self._is_last = is_last
        self._reduces = reduces and (is_last or self._reduces_every)
        if self._reduces_every:
            # The sums of the pass before may lie where the next ones will.
            self._let_finish(0)
            for unit in self._units:
                unit.is_reduced = False

    def reduce(self) -> None:
        """Begin to reduce what the hooks left over, where it is time, in the order of a backward pass."""
        if self._reduces:
            for unit in reversed(self._units):
                self._reduce(unit)

    def finish_step(self) -> None:
        """Wait until all gradients of this step are reduced."""
        self._let_finish(0)
        for unit in self._units:
            unit.is_reduced, unit.in_backward = False, False
            unit.free()
        self._reduces = False

    def _reduce(self, unit: WeightUnit) -> None:
        if unit.is_reduced:
            return
        self._let_finish(self._at_once - 1)
        self._under_way.append(unit)
        beside: AbstractContextManager[Any] = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        unit.reduce(beside, is_last=self._is_last)

    def _let_finish(self, left: int) -> None:
        """Wait for reductions, oldest first, until so many are left."""
        while len(self._under_way) > left:
            self._under_way.popleft().finish_reduction()

    def _before_forward(self, number: int) -> Any:
        unit = self._units[number]

        def reduce() -> None:
            if self._reduces:
                self._reduce(unit)

        def left() -> None:
            if self._queue is None:
                reduce()
            else:
                self._queue.put_off(reduce)
            unit.in_backward = False
            if not (self._goes_on and number == self._first_layer):
                unit.free()

        def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            unit.make_whole()
            # A layer that runs again within the backward pass comes after the next one.
            if not unit.in_backward:
                self._expect(number + 1)
            if torch.is_grad_enabled() and args[0].requires_grad:
                return (_CallingBack.apply(args[0], left), *args[1:])  # type: ignore[no-untyped-call]
            return args

        return hook

    def _after_forward(self, number: int) -> Any:
        unit = self._units[number]

        def needed() -> None:
            unit.in_backward = True
            unit.make_whole()
            # The backward pass of the embedding does not read it.
            if number > self._first_layer:
                self._expect(number - 1)
            elif self._goes_on:
                self._expect(0)

        def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
            is_next = self._turns_round and number == self._last_layer and torch.is_grad_enabled()
            # One that runs again is still needed there.
            if not unit.in_backward and not is_next:
                unit.free()
            return _with_call(output, needed)

        return hook

    @property
    def _goes_on(self) -> bool:
        """Whether another forward pass of this step follows the present backward pass."""
        return self._turns_round and not self._is_last

    def _expect(self, number: int) -> None:
        """Begin to gather a unit that is used next."""
        if number < len(self._units):
            self._units[number].gather()


def _with_call(output: Any, call: Callable[[], None]) -> Any:
    """Let the backward pass call a function before it does the layer with this output."""
    hidden = output[0] if isinstance(output, tuple) else output
    if not hidden.requires_grad:
        return output
    hidden = _CallingBack.apply(hidden, call)  # type: ignore[no-untyped-call]
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def _in_forward_order(stage: DecoderStage) -> list[list[nn.Module]]:
    """Return modules whose weights are used one after another; what stands behind one is used only after it."""
    first: list[list[nn.Module]] = [[stage.model.embed_tokens]] if stage.part.is_first else []  # type: ignore[list-item]
    last = [stage.model.norm, *([stage.lm_head] if hasattr(stage, "lm_head") else [])] if stage.part.is_last else []
    layers = [[layer] for layer in stage.decoder_layers]
    return [*first, *layers, *([last] if last else [])]  # type: ignore[list-item]


class _CallingBack(Function):
    """Passes a layer's input or output through; the backward pass calls a function when it comes there.

    At a layer's input it has done all of the layer then: the engine runs nodes in the opposite order of their making,
    and those that take in weight gradients at once.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return hidden

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return gradients[0], None
