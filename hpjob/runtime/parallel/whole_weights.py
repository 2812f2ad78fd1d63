"""Weights that every data-parallel rank holds whole, in the dtype of the computation: ZeRO 0 and 1 without copies.

Beside each weight lies what the optimizer needs of this rank's chunk: fp32 master, moments and, after the backward
pass, the reduced gradient. With ZeRO 0 the chunk is all of it. Nothing is copied on the way:

- Each weight's gradient is a whole fp32 sum. When the last backward pass of a step has left a layer, or its deferred
  gradients are there, the layer's sums are reduced beside the rest, straight into chunks.
- The update writes the rounded chunk where it lies in the weight. When it has done a layer, all ranks begin to gather
  the layer's weights in place, and the next forward pass waits before each layer for that layer's.

All ranks must begin the same collectives in the same order. What they are follows from the stage and from which weights
are trained, never from whether a gradient has reached a weight on this rank: one that did not is zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from hpjob.runtime.model.stage import DecoderStage
from hpjob.runtime.optimizer.master import MasterWeight
from hpjob.runtime.parallel.coalesced import Work, start_all_gather, start_all_reduce, start_reduce_scatter, wait_for
from hpjob.runtime.parallel.own_chunk import OwnChunk, SharingRanks
from hpjob.runtime.weight_gradients import WeightGradientQueue


class WholeWeight(Protocol):
    """A weight of this kind."""

    @property
    def parameter(self) -> nn.Parameter: ...

    @property
    def chunk(self) -> OwnChunk | None: ...

    @property
    def master(self) -> MasterWeight | None: ...

    @property
    def whole(self) -> Tensor:
        """What is computed with, as a plain tensor."""

    def collect_gradient(self) -> None:
        """Add what the last backward pass left to the sum."""


_AT_ONCE = 3
"""Layers whose sums may be on the way before memory counts more than a gap in the computation."""

W = TypeVar("W", bound=WholeWeight)


class _Unit:
    """Weights that are reduced and gathered together."""

    def __init__(self, items: Sequence[WholeWeight]) -> None:
        self._gathers: list[Work] = []
        self._by_ranks: dict[SharingRanks, list[tuple[WholeWeight, OwnChunk, MasterWeight]]] = {}
        for item in items:
            if item.chunk is not None and item.master is not None:
                item.chunk.exchange = self._gathers
                self._by_ranks.setdefault(item.chunk.ranks, []).append((item, item.chunk, item.master))
        self._is_on_gpu = bool(items) and items[0].whole.is_cuda
        if items and items[-1].chunk is not None:
            items[-1].chunk.begin_exchange = self.gather
        self._reductions: list[Work] = []
        self._reduced: list[Tensor] = []
        """Whole sums that must stay until then."""
        self.is_reduced = False
        """In this step, or on the way."""

    def reduce(self, beside: AbstractContextManager[Any]) -> None:
        """Begin to sum the gradients over all ranks; of each, the chunk is left.

        Args:
            beside: Makes another stream the current one, for what waits for collectives.
        """
        self.is_reduced = True
        for ranks, items in self._by_ranks.items():
            trained = [(chunk, master, _sum(item, master)) for item, chunk, master in items if _is_trained(item)]
            scattered, summed = [], []
            for chunk, master, total in trained:
                master.gradient = chunk.of(total)
                if chunk.is_even and ranks.shard.size() > 1:
                    master.gradient = torch.empty_like(master.gradient)
                    scattered.append((master.gradient, total))
                else:
                    summed.append(total)
            self._reduced += [total for _, total in scattered]
            self._reductions += _reduce(scattered, summed, ranks, beside)

    def finish_reduction(self) -> None:
        """Wait for the sums; the memory of whole ones is free then."""
        wait_for(self._reductions)
        self._reduced.clear()

    def gather(self) -> None:
        """Begin to make weights whole of which chunks have changed."""
        for ranks, items in self._by_ranks.items():
            news = [(chunk, item.whole) for item, chunk, _ in items if chunk.is_news]
            for chunk, _ in news:
                chunk.is_news = False
            if ranks.shard.size() > 1:
                self._gathers += _gather(news, ranks.shard)
        if not self._is_on_gpu:
            # Nothing hides it there, and gloo wants its groups to live until a collective is done.
            wait_for(self._gathers)

    def make_whole(self) -> None:
        """Wait until all weights are whole."""
        self.gather()
        wait_for(self._gathers)


def _is_trained(item: WholeWeight) -> bool:
    return item.parameter.requires_grad


def _sum(item: WholeWeight, master: MasterWeight) -> Tensor:
    """The whole sum of a weight's gradients."""
    item.collect_gradient()
    if master.gradient is None:
        return torch.zeros_like(item.whole, dtype=torch.float32)
    return master.gradient.contiguous()


def _reduce(
    scattered: list[tuple[Tensor, Tensor]],
    summed: list[Tensor],
    ranks: SharingRanks,
    beside: AbstractContextManager[Any],
) -> list[Work]:
    """Begin to sum: of some tensors each rank its chunk, of others all."""
    works: list[Work] = []
    chunks = [chunk for chunk, _ in scattered]
    if scattered:
        works.append(start_reduce_scatter(chunks, [total for _, total in scattered], ranks.shard))
    if summed and ranks.shard.size() > 1:
        works.append(start_all_reduce(summed, ranks.shard))
    if ranks.replicate.size() > 1 and (chunks or summed):
        with beside if works else nullcontext():
            wait_for(works)
            works.append(start_all_reduce([*chunks, *summed], ranks.replicate))
    return works


def _gather(news: list[tuple[OwnChunk, Tensor]], group: dist.ProcessGroup) -> list[Work]:
    works: list[Work] = []
    even = [(whole, chunk.of(whole)) for chunk, whole in news if chunk.is_even]
    if even:
        works.append(start_all_gather([whole for whole, _ in even], [part for _, part in even], group))
    uneven = [(chunk, whole) for chunk, whole in news if not chunk.is_even]
    for chunk, whole in uneven:
        chunk.clear_others(whole)
    if uneven:
        # Of each byte all ranks but one have zero, so the sum is that one's in any dtype.
        works.append(start_all_reduce([whole.view(torch.uint8) for _, whole in uneven], group))
    return works


class WholeWeights(Generic[W]):
    """Reduces the gradients of a stage and keeps its weights whole.

    Hooks are those of whole layers, around what is compiled.

    Args:
        stage: With memory.
        items: All its weights.
        queue: Of weight gradients that are computed after the backward pass.
        frees_early: Whole sums do not exist before the pass that is reduced, so that memory grows with each that is
            left to the end of the step.
    """

    def __init__(
        self,
        stage: DecoderStage,
        items: Sequence[W],
        queue: WeightGradientQueue | None = None,
        *,
        frees_early: bool = False,
    ) -> None:
        self._queue = queue
        self._frees_early = frees_early
        self._under_way: deque[_Unit] = deque()
        on_gpu = bool(items) and items[0].whole.is_cuda
        self._stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        self.reduces = False
        """Whether what computes weight gradients now, or next, computes a step's last ones."""
        self.in_order: list[W] = []
        """The weights in the order of a forward pass, so that those that are exchanged together follow one another."""
        self._units: list[_Unit] = []
        left = {id(item.parameter): item for item in items}
        for modules in _in_forward_order(stage):
            owned = [left.pop(id(p)) for module in modules for p in module.parameters()]
            self.in_order += owned
            unit = _Unit(owned)
            self._units.append(unit)
            modules[0].register_forward_pre_hook(self._before_forward(unit), prepend=True)
        if left:
            raise ValueError(f"{len(left)} weights are in no layer, so nothing would reduce their gradients")

    def _before_forward(self, unit: _Unit) -> Any:
        def reduce() -> None:
            if self.reduces:
                self._reduce(unit)

        def left() -> None:
            if self._queue is None:
                reduce()
            else:
                self._queue.put_off(reduce)

        def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            unit.make_whole()
            if torch.is_grad_enabled() and args[0].requires_grad:
                return (_Leaving.apply(args[0], left), *args[1:])  # type: ignore[no-untyped-call]
            return args

        return hook

    def reduce(self) -> None:
        """Begin to reduce what the hooks left over, in the order of a backward pass."""
        for unit in reversed(self._units):
            self._reduce(unit)

    def finish_reduction(self) -> None:
        """Wait until all gradients of this step are reduced."""
        self.reduce()
        self._let_finish(0)
        for unit in self._units:
            unit.is_reduced = False
        self.reduces = False

    def _reduce(self, unit: _Unit) -> None:
        if unit.is_reduced:
            return
        unit.reduce(nullcontext() if self._stream is None else torch.cuda.stream(self._stream))
        self._under_way.append(unit)
        if self._frees_early:
            self._let_finish(_AT_ONCE)

    def _let_finish(self, left: int) -> None:
        """Wait for reductions, oldest first, until so many are left."""
        while len(self._under_way) > left:
            self._under_way.popleft().finish_reduction()


def _in_forward_order(stage: DecoderStage) -> list[list[nn.Module]]:
    """Return modules whose weights are used one after another; what stands behind one is used only after it."""
    first: list[list[nn.Module]] = [[stage.model.embed_tokens]] if stage.part.is_first else []  # type: ignore[list-item]
    last = [stage.model.norm, *([stage.lm_head] if hasattr(stage, "lm_head") else [])] if stage.part.is_last else []
    layers = [[layer] for layer in stage.decoder_layers]
    return [*first, *layers, *([last] if last else [])]  # type: ignore[list-item]


class _Leaving(Function):
    """Passes a layer's input through; the backward pass calls a function when it has done all of the layer.

    The engine runs nodes in the opposite order of their making, and those that take in weight gradients at once: all
    that belong to the layer were made after this one.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, left: Any) -> Tensor:
        ctx.left = left
        return hidden

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.left()
        return gradients[0], None
