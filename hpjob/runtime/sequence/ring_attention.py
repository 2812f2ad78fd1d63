"""Causal attention over a sequence that is spread in zigzag order over a ring of ranks.

Queries stay, K and V circulate with their own number of heads. Blocks are merged by their log-sum-exp, so no rank
ever holds the whole sequence, and the backward pass circulates K and V again, followed by their gradients.
Nothing here makes the host wait for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpjob.core.errors import UserInputError
from hpjob.runtime.sequence.backend_choice import choose_backend
from hpjob.runtime.sequence.block_attention import AttentionBackend, BlockSettings
from hpjob.runtime.sequence.ring import GradientCourier, Ring, circulate, ring_of
from hpjob.runtime.sequence.sequence_mask import SequenceMask
from hpjob.runtime.sequence.zigzag import zigzag_position_ids


@dataclass(frozen=True, kw_only=True)
class _Settings:
    ring: Ring
    backend: AttentionBackend
    scale: float
    mask: SequenceMask | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """Which of the local queries meet which of the visiting keys."""

    queries: slice
    keys: slice
    is_causal: bool


def _block(rank: int, source: int, length: int) -> _Block:
    """Zigzag order leaves three cases: own keys, keys of a lower rank, keys of a higher rank."""
    whole, half = slice(0, length), length // 2
    if source == rank:
        return _Block(queries=whole, keys=whole, is_causal=True)
    if source < rank:
        return _Block(queries=whole, keys=slice(0, half), is_causal=False)
    return _Block(queries=slice(half, length), keys=whole, is_causal=False)


def _block_settings(settings: _Settings, block: _Block, source: int, q: Tensor) -> BlockSettings:
    if settings.mask is None:
        return BlockSettings(scale=settings.scale, is_causal=block.is_causal)
    ring = settings.ring
    length = q.shape[2] * ring.size
    own = zigzag_position_ids(length, ring.rank, ring.size, device=q.device)
    visiting = zigzag_position_ids(length, source, ring.size, device=q.device)
    bias = settings.mask.bias(own[block.queries], visiting[block.keys], q.dtype)
    return BlockSettings(scale=settings.scale, bias=bias)


class _MergedRows:
    """Output and log-sum-exp of all local queries over the blocks so far, in fp32."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out = out.to(torch.promote_types(out.dtype, torch.float32))
        self.lse = lse.contiguous()

    def merge(self, queries: slice, out: Tensor, lse: Tensor) -> None:
        old_lse = self.lse[:, :, queries]
        new_lse = torch.logaddexp(old_lse, lse)
        rows = self.out[:, :, queries]
        rows.mul_(torch.exp(old_lse - new_lse)[..., None])
        rows.add_(out * torch.exp(lse - new_lse)[..., None])
        old_lse.copy_(new_lse)


def _attend(q: Tensor, k: Tensor, v: Tensor, settings: _Settings) -> tuple[Tensor, Tensor]:
    """Output in the dtype of ``q``, of shape (batch, local sequence, heads, head_dim), and log-sum-exp."""
    ring, backend = settings.ring, settings.backend
    rows: _MergedRows | None = None
    for outer_step, inner_step, (key, value) in circulate(ring, torch.stack((k, v))):
        source = ring.source(outer_step, inner_step)
        block = _block(ring.rank, source, q.shape[2])
        out, lse = backend.forward(
            q[:, :, block.queries],
            key[:, :, block.keys],
            value[:, :, block.keys],
            _block_settings(settings, block, source, q),
        )
        if rows is None:
            rows = _MergedRows(out, lse)
        else:
            rows.merge(block.queries, out, lse)
    if rows is None:
        raise RuntimeError("a ring has at least one step")
    return rows.out.transpose(1, 2).to(q.dtype, memory_format=torch.contiguous_format).contiguous(), rows.lse


def _gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, settings: _Settings
) -> tuple[Tensor, Tensor]:
    """Gradient of ``q``, and those of ``k`` and ``v`` stacked."""
    grad_out = grad_out.contiguous()
    ring = settings.ring
    sum_dtype = torch.promote_types(q.dtype, torch.float32)
    grad_q: Tensor | None = None
    courier = GradientCourier(ring)
    for outer_step, inner_step, (key, value) in circulate(ring, torch.stack((k, v))):
        source = ring.source(outer_step, inner_step)
        block = _block(ring.rank, source, q.shape[2])
        part_q, part_k, part_v = settings.backend.backward(
            grad_out[:, :, block.queries],
            q[:, :, block.queries],
            key[:, :, block.keys],
            value[:, :, block.keys],
            out[:, :, block.queries],
            lse[:, :, block.queries],
            _block_settings(settings, block, source, q),
        )
        if grad_q is None:
            # A rank's first block is that of its own keys, all queries and keys.
            grad_q = part_q.to(sum_dtype, memory_format=torch.contiguous_format, copy=True)
        else:
            grad_q[:, :, block.queries] += part_q
        contribution = torch.empty((2, *k.shape), dtype=sum_dtype, device=k.device)
        contribution[0, :, :, block.keys], contribution[1, :, :, block.keys] = part_k, part_v
        contribution[:, :, :, part_k.shape[2] :] = 0
        courier.add(contribution, inner_step)
    if grad_q is None:
        raise RuntimeError("a ring has at least one step")
    return grad_q.to(q.dtype), courier.collect().to(k.dtype)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, settings: _Settings) -> Tensor:
        out, lse = _attend(q, k, v, settings)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = settings
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_q, (grad_k, grad_v) = _gradients(grad_outputs[0], q, k, v, out.transpose(1, 2), lse, ctx.settings)
        return grad_q, grad_k, grad_v, None


def _settings(
    q: Tensor, k: Tensor, ring: Ring, scale: float, mask: SequenceMask | None, backend: AttentionBackend | None = None
) -> _Settings:
    chosen = backend or choose_backend(q, k, needs_bias=mask is not None).backend
    if mask is not None and not chosen.supports_bias:
        raise UserInputError(
            f"the attention kernel '{chosen.name}' cannot mask packed documents or a sliding window in ring_attn",
            hint="leave the choice of the kernel to hpjob, or use all_to_all",
        )
    return _Settings(ring=ring, backend=chosen, scale=scale, mask=mask)


@torch.library.custom_op(
    "hpjob::ring_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? document_ids, int ring, float scale, int? window)"
    " -> (Tensor, Tensor)",
)
def _operator(
    q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None, ring: int, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    return _attend(q, k, v, _settings(q, k, ring_of(ring), scale, _mask(document_ids, window)))


@torch.library.custom_op(
    "hpjob::ring_attention_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? document_ids, int ring,"
    " float scale, int? window) -> (Tensor, Tensor)",
)
def _backward_operator(  # noqa: PLR0913, PLR0917  (of the schema)
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    document_ids: Tensor | None,
    ring: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    settings = _settings(q, k, ring_of(ring), scale, _mask(document_ids, window))
    return _gradients(grad_out.transpose(1, 2), q, k, v, out.transpose(1, 2), lse, settings)


def _mask(document_ids: Tensor | None, window: int | None) -> SequenceMask | None:
    if document_ids is None and window is None:
        return None
    return SequenceMask(document_ids=document_ids, sliding_window=window)


@_operator.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, length, head_dim = q.shape
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((batch, length, heads, head_dim)), q.new_empty((batch, heads, length), dtype=lse_dtype)


@_backward_operator.register_fake
def _(_: Tensor, q: Tensor, k: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty((2, *k.shape))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, document_ids, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, document_ids)


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grad_q, grad_kv = _backward_operator(grad_out, *ctx.saved_tensors, *ctx.settings)
    return grad_q, grad_kv[0], grad_kv[1], None, None, None, None


_operator.register_autograd(_differentiate, setup_context=_keep)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Ring,
    *,
    scale: float | None = None,
    mask: SequenceMask | None = None,
    backend: AttentionBackend | None = None,
) -> Tensor:
    """Causal attention of this rank's zigzag part of the sequence to the whole sequence.

    Compiled code calls it as one operator, whose messages and kernels the compiler does not see.

    Args:
        q: Shape (batch, heads, local sequence, head_dim), in the order of ``zigzag_split``.
        k: Shape (batch, kv_heads, local sequence, head_dim); kv_heads divides heads and is not repeated.
        v: Shape of ``k``.
        ring: The ranks that hold the sequence.
        scale: Factor of the scores; 1 / sqrt(head_dim) by default.
        mask: Packed documents or a sliding window.
        backend: Kernel of one block; by default, and in compiled code, the fastest one for the tensors.

    Returns:
        Shape and dtype of ``q``. Sums over blocks and over ranks are fp32 whatever the dtype.

    Raises:
        UserInputError: heads is no multiple of kv_heads, the local length is odd, or the given kernel cannot mask.
    """
    if q.shape[1] % k.shape[1]:
        raise UserInputError(
            f"{q.shape[1]} heads are no multiple of {k.shape[1]} kv heads",
            hint="choose model.num_attention_heads as a multiple of model.num_key_value_heads",
        )
    if q.shape[2] % 2 or q.shape[2] != k.shape[2]:
        raise UserInputError(
            f"zigzag order needs an even number of tokens a rank, equal for queries and keys, not {q.shape[2]} "
            f"and {k.shape[2]}",
            hint="split the sequence with hpjob.runtime.sequence.zigzag",
        )
    factor = scale or 1 / math.sqrt(q.shape[-1])
    if torch.compiler.is_compiling():
        document_ids, window = (None, None) if mask is None else (mask.document_ids, mask.sliding_window)
        out: Tensor = _operator(q, k, v, document_ids, ring.number, factor, window)[0]
        return out.transpose(1, 2)
    settings = _settings(q, k, ring, factor, mask, backend)
    result: Tensor = _RingAttention.apply(q, k, v, settings)  # type: ignore[no-untyped-call]
    return result
