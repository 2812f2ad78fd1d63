"""Causal attention over a sequence that is spread in zigzag order over a ring of ranks.

Queries stay, K and V circulate with their own number of heads. Blocks are merged by their log-sum-exp, so no rank
ever holds the whole sequence, and the backward pass circulates K and V again, followed by their gradients.
Nothing here makes the host wait for the device. The passes themselves are in ``ring_passes``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hpjob.core.errors import UserInputError
from hpjob.runtime.sequence.backend_choice import choose_backend
from hpjob.runtime.sequence.block_attention import AttentionBackend
from hpjob.runtime.sequence.ring import Ring, ring_of
from hpjob.runtime.sequence.ring_passes import RingSettings, attend, gradients
from hpjob.runtime.sequence.sequence_mask import SequenceMask


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, settings: RingSettings) -> Tensor:
        out, lse = attend(q, k, v, settings)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = settings
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = gradients(grad_outputs[0].transpose(1, 2), q, k, v, out, lse, ctx.settings)
        grad_q, grad_k, grad_v = (grad.transpose(1, 2) for grad in grads)
        return grad_q, grad_k, grad_v, None


def _settings(
    q: Tensor, k: Tensor, ring: Ring, scale: float, mask: SequenceMask | None, backend: AttentionBackend | None = None
) -> RingSettings:
    chosen = backend or choose_backend(q, k, needs_bias=mask is not None).backend
    if mask is not None and not chosen.supports_bias:
        raise UserInputError(
            f"the attention kernel '{chosen.name}' cannot mask packed documents or a sliding window in ring_attn",
            hint="leave the choice of the kernel to hpjob, or use all_to_all",
        )
    return RingSettings(ring=ring, backend=chosen, scale=scale, mask=mask)


@torch.library.custom_op(
    "hpjob::ring_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? document_ids, int ring, float scale, int? window)"
    " -> (Tensor, Tensor)",
)
def _operator(
    q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None, ring: int, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    return attend(q, k, v, _settings(q, k, ring_of(ring), scale, _mask(document_ids, window)))


@torch.library.custom_op(
    "hpjob::ring_attention_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? document_ids, int ring,"
    " float scale, int? window) -> (Tensor, Tensor, Tensor)",
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
) -> tuple[Tensor, Tensor, Tensor]:
    settings = _settings(q, k, ring_of(ring), scale, _mask(document_ids, window))
    return gradients(grad_out, q, k, v, out, lse, settings)


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
def _(_: Tensor, q: Tensor, k: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = (tensor.new_empty(tensor.transpose(1, 2).shape) for tensor in (q, k, k))
    return grad_q, grad_k, grad_v


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, document_ids, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, document_ids)


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = _backward_operator(grad_out, *ctx.saved_tensors, *ctx.settings)
    return *(grad.transpose(1, 2) for grad in grads), None, None, None, None


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
