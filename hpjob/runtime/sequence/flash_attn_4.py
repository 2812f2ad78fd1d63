"""Attention of the flash-attn-4 package (CuTe kernels for Hopper and newer) as operators of torch.

As operators they stay one node of a compiled graph, and the package is looked at only when they run. Called are the
package's two functions below its autograd: their first results are the same in all its versions.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from hpjob.runtime.sequence.block_attention import AttentionBackend, BlockSettings, Gradients

FIRST_CAPABILITY = (9, 0)
"""Oldest compute capability with kernels both ways."""
LARGEST_HEAD_DIM = 128
_LOAD_BYTES = 16
_FUNCTIONS = ("_flash_attn_fwd", "_flash_attn_bwd")


@torch.library.custom_op("hpjob::flash_attn_4", mutates_args=())
def flash_attn_4(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Attention.

    Args:
        q: Shape (batch, queries, heads, head_dim), bf16 or fp16.
        k: Shape (batch, keys, kv_heads, head_dim).
        v: Shape of ``k``.
        scale: Factor of the scores.
        is_causal: A query sees keys up to its own position.

    Returns:
        Output in the shape of ``q``, and log-sum-exp (batch, heads, queries) in fp32.
    """
    query, key, value = _readable(q), _readable(k), _readable(v)
    out, lse, *_ = _package()._flash_attn_fwd(query, key, value, softmax_scale=scale, causal=is_causal, return_lse=True)
    return out, lse


@flash_attn_4.register_fake
def _shapes(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, queries), dtype=torch.float32)


@torch.library.custom_op("hpjob::flash_attn_4_backward", mutates_args=())
def flash_attn_4_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; shapes as in ``flash_attn_4``."""
    grad_q, grad_k, grad_v, *_ = _package()._flash_attn_bwd(
        _readable(q),
        _readable(k),
        _readable(v),
        _readable(out),
        _readable(grad_out),
        lse.contiguous(),
        softmax_scale=scale,
        causal=is_causal,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return grad_q.contiguous(), grad_k.contiguous(), grad_v.contiguous()


def _readable(tensor: Tensor) -> Tensor:
    """Copy what the kernels cannot read where it lies: rows of any distance do, if they start at 16 bytes."""
    *distances, last = (
        stride * tensor.element_size() for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )
    is_aligned = all(place and place % _LOAD_BYTES == 0 for place in distances) and tensor.data_ptr() % _LOAD_BYTES == 0
    return tensor if is_aligned and last == tensor.element_size() else tensor.contiguous()


@flash_attn_4_backward.register_fake
def _gradient_shapes(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, ctx.is_causal = inputs
    ctx.save_for_backward(q, k, v, *output)


def _gradients(ctx: Any, grad_out: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    grads = flash_attn_4_backward(grad_out, *ctx.saved_tensors, ctx.scale, ctx.is_causal)
    return *grads, None, None


flash_attn_4.register_autograd(_gradients, setup_context=_keep)


class FlashAttn4Backend(AttentionBackend):
    """Kernels of the flash-attn-4 package; bf16 and fp16."""

    name = "flash-attn-4"
    supports_bias = False
    native_gqa = True

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, settings: BlockSettings) -> tuple[Tensor, Tensor]:
        out, lse = flash_attn_4(*_heads_last(q, k, v), settings.scale, settings.is_causal)
        return out.transpose(1, 2), lse

    def _backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, settings: BlockSettings
    ) -> Gradients:
        grads = flash_attn_4_backward(
            *_heads_last(grad_out, q, k, v, out),
            lse,
            settings.scale,
            settings.is_causal,
        )
        grad_q, grad_k, grad_v = (grad.transpose(1, 2) for grad in grads)
        return grad_q, grad_k, grad_v


@functools.cache
def has_flash_attn_4() -> bool:
    """Whether the package and all that it builds on can be imported."""
    try:
        package = _package()
    except (ImportError, OSError, RuntimeError):  # absent, or built for another torch or CUDA
        return False
    return all(hasattr(package, name) for name in _FUNCTIONS)


def _package() -> Any:
    return importlib.import_module("flash_attn.cute.interface")


def _heads_last(*tensors: Tensor) -> list[Tensor]:
    """As the kernels want them; without a copy where the heads were split from rows."""
    return [tensor.transpose(1, 2) for tensor in tensors]
