"""Weights that every data-parallel rank holds whole, in the dtype of the computation: ZeRO 0 and 1 without copies.

Beside each weight lies what the optimizer needs of this rank's chunk: fp32 master, moments and, after the backward
pass, the reduced gradient. With ZeRO 0 the chunk is all of it. Nothing is copied on the way:

- Each weight's gradient is a whole fp32 sum. When the last backward pass of a step has left a layer, the sums of the
  layer are reduced in place, each rank's chunk where it lies, beside the rest of the pass.
- The update writes the rounded chunk where it lies in the weight. All ranks then gather the weights in place, layer
  after layer, and the next forward pass waits before each layer for that layer's.

All ranks must begin the same collectives in the same order. What they are follows from the stage and from which weights
are trained, never from whether a gradient has reached a weight on this rank: one that did not is zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from hpjob.runtime.mesh import Mesh
from hpjob.runtime.model.stage import DecoderStage
from hpjob.runtime.optimizer.master import MasterWeight
from hpjob.runtime.parallel.coalesced import Work, start_all_gather, start_all_reduce, start_reduce_scatter
from hpjob.runtime.parallel.region import chunk_bounds


@dataclass(frozen=True, slots=True)
class SharingRanks:
    """Ranks that hold the same weights.

    Attributes:
        shard: Those that have a chunk each.
        replicate: Those that have the same chunk.
    """

    shard: dist.ProcessGroup
    replicate: dist.ProcessGroup


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
    """

    dim: int
    begin: int
    length: int
    is_even: bool
    ranks: SharingRanks
    is_news: bool = False
    exchange: list[Work] = field(default_factory=list)

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
        _wait(self.exchange)

    def clear_others(self, whole: Tensor) -> None:
        """Set what other ranks have to zero."""
        end = self.begin + self.length
        whole.narrow(self.dim, 0, self.begin).zero_()
        whole.narrow(self.dim, end, whole.shape[self.dim] - end).zero_()


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


class _Unit:
    """Weights that are reduced and gathered together."""

    def __init__(self, items: Iterable[WholeWeight]) -> None:
        self._gathers: list[Work] = []
        self._by_ranks: dict[SharingRanks, list[tuple[WholeWeight, OwnChunk, MasterWeight]]] = {}
        for item in items:
            if item.chunk is not None and item.master is not None:
                item.chunk.exchange = self._gathers
                self._by_ranks.setdefault(item.chunk.ranks, []).append((item, item.chunk, item.master))
        self._reductions: list[Work] = []
        self.is_reduced = False
        """In this step, or on the way."""

    def reduce(self, beside: AbstractContextManager[Any]) -> None:
        """Begin to sum the gradients over all ranks, unless that was begun; of each, the chunk is left.

        Args:
            beside: Makes another stream the current one, for what waits for collectives.
        """
        if self.is_reduced:
            return
        self.is_reduced = True
        for ranks, items in self._by_ranks.items():
            trained = [(chunk, master, _sum(item, master)) for item, chunk, master in items if _is_trained(item)]
            even = [(chunk.of(total), total) for chunk, _, total in trained if chunk.is_even]
            uneven = [total for chunk, _, total in trained if not chunk.is_even]
            for chunk, master, total in trained:
                master.gradient = chunk.of(total)
            self._reductions += _reduce(even, uneven, ranks, beside)

    def finish_reduction(self) -> None:
        """Wait for the sums."""
        _wait(self._reductions)
        self.is_reduced = False

    def gather(self) -> None:
        """Begin to make weights whole of which chunks have changed."""
        for ranks, items in self._by_ranks.items():
            news = [(chunk, item.whole) for item, chunk, _ in items if chunk.is_news]
            for chunk, _ in news:
                chunk.is_news = False
            if ranks.shard.size() > 1:
                self._gathers += _gather(news, ranks.shard)

    def make_whole(self) -> None:
        """Wait until all weights are whole."""
        self.gather()
        _wait(self._gathers)


def _is_trained(item: WholeWeight) -> bool:
    return item.parameter.requires_grad


def _sum(item: WholeWeight, master: MasterWeight) -> Tensor:
    """The whole sum of a weight's gradients."""
    item.collect_gradient()
    if master.gradient is None:
        return torch.zeros_like(item.whole, dtype=torch.float32)
    return master.gradient.contiguous()


def _reduce(
    even: list[tuple[Tensor, Tensor]], uneven: list[Tensor], ranks: SharingRanks, beside: AbstractContextManager[Any]
) -> list[Work]:
    works: list[Work] = []
    chunks = [chunk for chunk, _ in even]
    if ranks.shard.size() > 1:
        if even:
            works.append(start_reduce_scatter(chunks, [total for _, total in even], ranks.shard))
        if uneven:
            works.append(start_all_reduce(uneven, ranks.shard))
    summed = [*chunks, *uneven]
    if ranks.replicate.size() > 1 and summed:
        with beside if works else nullcontext():
            _wait(works)
            works.append(start_all_reduce(summed, ranks.replicate))
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


def _wait(works: list[Work]) -> None:
    for work in works:
        work.wait()
    works.clear()


class WholeWeights:
    """Reduces the gradients of a stage and keeps its weights whole.

    Hooks are those of whole layers, around what is compiled.

    Args:
        stage: With memory.
        items: All its weights.
    """

    def __init__(self, stage: DecoderStage, items: Sequence[WholeWeight]) -> None:
        on_gpu = bool(items) and items[0].whole.is_cuda
        self._stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        self.reduces = False
        """Whether the backward pass that is next, or running, leaves whole gradients behind."""
        self._units: list[_Unit] = []
        left = {id(item.parameter): item for item in items}
        for modules in _in_forward_order(stage):
            owned = [left.pop(id(p), None) for module in modules for p in module.parameters()]
            unit = _Unit([item for item in owned if item is not None])
            self._units.append(unit)
            modules[0].register_forward_pre_hook(self._before_forward(unit), prepend=True)

    def _before_forward(self, unit: _Unit) -> Any:
        def left() -> None:
            if self.reduces:
                unit.reduce(self._beside())

        def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            unit.make_whole()
            if torch.is_grad_enabled() and args[0].requires_grad:
                return (_Leaving.apply(args[0], left), *args[1:])  # type: ignore[no-untyped-call]
            return args

        return hook

    def reduce(self) -> None:
        """Begin to reduce what the hooks left over, in the order of a backward pass."""
        for unit in reversed(self._units):
            unit.reduce(self._beside())

    def finish_reduction(self) -> None:
        """Wait until all gradients of this step are reduced."""
        self.reduce()
        for unit in self._units:
            unit.finish_reduction()
        self.reduces = False

    def gather(self) -> None:
        """Begin to make weights whole whose chunks have changed, in the order of a forward pass."""
        for unit in self._units:
            unit.gather()

    def _beside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


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
