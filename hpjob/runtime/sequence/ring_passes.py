"""Forward and backward pass of ring attention on one rank: which block is computed while what travels.

Tensors lie in memory as (batch, sequence, heads, head_dim), as linear layers write and read them, and are seen by the
kernels as (batch, heads, sequence, head_dim). Output and gradients are formed in halves of the rows: in zigzag order
a visiting block touches one half or both, so the last sum of each half writes the result, rounded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from hpjob.runtime.sequence.block_attention import AttentionBackend, BlockSettings, Gradients
from hpjob.runtime.sequence.gradient_courier import GradientCourier, Halves
from hpjob.runtime.sequence.merged_blocks import MergedBlocks
from hpjob.runtime.sequence.ring import Ring, circulate
from hpjob.runtime.sequence.row_sums import RowSum, accumulate, write_copy, write_sum
from hpjob.runtime.sequence.sequence_mask import SequenceMask
from hpjob.runtime.sequence.zigzag import ZigzagBlock, zigzag_block, zigzag_halves, zigzag_position_ids


@dataclass(frozen=True, kw_only=True)
class RingSettings:
    """What is the same for all blocks."""

    ring: Ring
    backend: AttentionBackend
    scale: float
    mask: SequenceMask | None


def attend(q: Tensor, k: Tensor, v: Tensor, settings: RingSettings) -> tuple[Tensor, Tensor]:
    """Output in the dtype of ``q``, of shape (batch, local sequence, heads, head_dim), and log-sum-exp."""
    ring = settings.ring
    merged: MergedBlocks | None = None
    for outer_step, inner_step, visiting in circulate(ring, *_to_send(k, v, ring)):
        source = ring.source(outer_step, inner_step)
        block = zigzag_block(ring.rank, source, q.shape[2])
        key, value = (tensor.transpose(1, 2)[:, :, block.keys] for tensor in visiting)
        out, lse = settings.backend.forward(
            q[:, :, block.queries], key, value, _block_settings(settings, block, source, q)
        )
        if merged is None:
            # A rank's first block is that of its own keys, all queries and keys.
            merged = MergedBlocks(out.transpose(1, 2), lse, ring)
        else:
            merged.add(block.queries, out.transpose(1, 2), lse)
    if merged is None:
        raise RuntimeError("a ring has at least one step")
    return merged.out.contiguous(), merged.lse


def gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, settings: RingSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each of shape (batch, local sequence, its heads, head_dim).

    Args:
        grad_out: Shape (batch, local sequence, heads, head_dim).
        q: Shape (batch, heads, local sequence, head_dim).
        k: Shape (batch, kv_heads, local sequence, head_dim).
        v: Shape of ``k``.
        out: First result of :func:`attend`.
        lse: Second result of :func:`attend`.
        settings: Those of :func:`attend`.
    """
    ring = settings.ring
    rows = _Rows(grad_out=grad_out.contiguous().transpose(1, 2), q=q, out=out.transpose(1, 2), lse=lse)
    own = _OwnBlock(rows, k, v, settings)
    of_queries = RowSum(ring.buffers), RowSum(ring.buffers)
    courier = GradientCourier(ring, num_tensors=2)
    for outer_step, inner_step, visiting in circulate(ring, *_to_send(k, v, ring)):
        source = ring.source(outer_step, inner_step)
        if source == ring.rank:
            own.compute_next()
            continue
        block = zigzag_block(ring.rank, source, q.shape[2])
        key, value = (tensor.transpose(1, 2)[:, :, block.keys] for tensor in visiting)
        parts = rows.of(block.queries).gradients(key, value, _block_settings(settings, block, source, q), settings)
        part_q, part_k, part_v = (part.transpose(1, 2) for part in parts)
        for total, part in zip(of_queries, _query_halves(part_q, block, q.shape[2]), strict=True):
            total.add(part)
        courier.add(_key_halves((part_k, part_v), block, q.shape[2]), outer_step, inner_step)
    while own.has_more:
        own.compute_next()
        courier.advance()
    early, late = courier.collect()
    others = [[total.value for total in of_queries], *zip(early, late, strict=True)]
    results = own.with_sums(others)
    ring.buffers.give_back(*(tensor for pair in others for tensor in pair if tensor is not None))
    return results


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """What the backward pass knows of queries, seen as (batch, heads, sequence, head_dim); lse without the last."""

    grad_out: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor

    def of(self, queries: slice, heads: slice = slice(None)) -> _Rows:
        grad_out, q, out, lse = (tensor[:, heads, queries] for tensor in (self.grad_out, self.q, self.out, self.lse))
        return _Rows(grad_out=grad_out, q=q, out=out, lse=lse)

    def gradients(self, key: Tensor, value: Tensor, block: BlockSettings, settings: RingSettings) -> Gradients:
        return settings.backend.backward(self.grad_out, self.q, key, value, self.out, self.lse, block)


class _OwnBlock:
    """Gradients of the block of a rank's own keys, computed a part of the heads at a time.

    Heads do not depend on each other: the first part is computed while the first message with K and V travels, the
    others while the last gradients are on their way home, which in a ring of rings are two messages.
    """

    def __init__(self, rows: _Rows, k: Tensor, v: Tensor, settings: RingSettings) -> None:
        self._rows = rows
        self._k, self._v = k, v
        self._settings = settings
        self._parts: list[Gradients] = []
        self._heads = _head_parts(k.shape[1], settings)

    @property
    def has_more(self) -> bool:
        """Whether there are heads to compute."""
        return len(self._parts) < len(self._heads)

    def compute_next(self) -> None:
        """Compute the next part of the heads."""
        rank, length = self._settings.ring.rank, self._k.shape[2]
        block = zigzag_block(rank, rank, length)
        heads = self._heads[len(self._parts)]
        rows = self._rows.of(block.queries, _query_heads(heads, self._rows.q.shape[1] // self._k.shape[1]))
        block_settings = _block_settings(self._settings, block, rank, self._rows.q)
        self._parts.append(rows.gradients(self._k[:, heads], self._v[:, heads], block_settings, self._settings))

    def with_sums(self, others: Sequence[Sequence[Tensor | None]]) -> tuple[Tensor, Tensor, Tensor]:
        """Whole gradients of q, k and v.

        Args:
            others: For each of them what other blocks gave its early and its late half; None = nothing.
        """
        groups = self._rows.q.shape[1] // self._k.shape[1]
        of_queries = [_query_heads(heads, groups) for heads in self._heads]
        tensors = (self._rows.q, of_queries), (self._k, self._heads), (self._v, self._heads)
        grad_q, grad_k, grad_v = (
            _add_to_own([part.transpose(1, 2) for part in parts], heads, other, tensor)
            for parts, (tensor, heads), other in zip(zip(*self._parts, strict=True), tensors, others, strict=True)
        )
        return grad_q, grad_k, grad_v


def _add_to_own(
    parts: Sequence[Tensor], heads: Sequence[slice], others: Sequence[Tensor | None], like: Tensor
) -> Tensor:
    """Parts of the heads with all that is added to them, in the dtype of ``like``."""
    batch, num_heads, length, head_dim = like.shape
    if len(parts) == 1 and parts[0].dtype == like.dtype:
        for rows, other in zip(zigzag_halves(length), others, strict=True):
            if other is not None:
                accumulate(parts[0][:, rows], other)
        return parts[0].contiguous()
    result = like.new_empty((batch, length, num_heads, head_dim))
    for part, which in zip(parts, heads, strict=True):
        for rows, other in zip(zigzag_halves(length), others, strict=True):
            if other is None:
                write_copy(result[:, rows, which], part[:, rows])
            else:
                write_sum(result[:, rows, which], part[:, rows], other[:, :, which])
    return result


def _head_parts(kv_heads: int, settings: RingSettings) -> list[slice]:
    """Heads of k that are computed together; one kv head or a mask of one's own for each block is not split."""
    ring = settings.ring
    if ring.size == 1 or kv_heads == 1 or settings.mask is not None:
        return [slice(0, kv_heads)]
    num_late = 2 if 1 < ring.width < ring.size and kv_heads > 2 else 1
    first = kv_heads // 2
    cuts = [0, *(first + (kv_heads - first) * part // num_late for part in range(num_late + 1))]
    return [slice(start, stop) for start, stop in pairwise(cuts)]


def _query_heads(kv_heads: slice, groups: int) -> slice:
    return slice(kv_heads.start * groups, kv_heads.stop * groups)


def _query_halves(part: Tensor, block: ZigzagBlock, length: int) -> tuple[Tensor | None, Tensor]:
    early, late = zigzag_halves(length)
    return (None, part) if block.queries == late else (part[:, early], part[:, late])


def _key_halves(parts: Iterable[Tensor], block: ZigzagBlock, length: int) -> Halves:
    early, late = zigzag_halves(length)
    whole = list(parts)
    return [part[:, early] for part in whole], None if block.keys == early else [part[:, late] for part in whole]


def _to_send(k: Tensor, v: Tensor, ring: Ring) -> list[Tensor]:
    """K and V as (batch, sequence, kv_heads, head_dim); copied to a buffer only where they do not lie so."""
    rows = []
    for tensor in (k.transpose(1, 2), v.transpose(1, 2)):
        if tensor.is_contiguous() or ring.size == 1:
            rows.append(tensor)
        else:
            rows.append(ring.buffers.take(tensor.shape, tensor.dtype, tensor.device).copy_(tensor))
    return rows


def _block_settings(settings: RingSettings, block: ZigzagBlock, source: int, q: Tensor) -> BlockSettings:
    if settings.mask is None:
        return BlockSettings(scale=settings.scale, is_causal=block.is_causal)
    ring = settings.ring
    length = q.shape[2] * ring.size
    own = zigzag_position_ids(length, ring.rank, ring.size, device=q.device)
    visiting = zigzag_position_ids(length, source, ring.size, device=q.device)
    bias = settings.mask.bias(own[block.queries], visiting[block.keys], q.dtype)
    return BlockSettings(scale=settings.scale, bias=bias)
