"""Block attention by the fused CUDA kernels: flash and memory-efficient of torch, cuDNN, and the flash-attn package.

Kernels read the log-sum-exp as plain memory, so slices of it are made contiguous before they are handed over.
"""

from __future__ import annotations

import importlib
import math

import torch
from torch import Tensor
from torch.nn import functional

from hpjob.runtime.sequence.block_attention import AttentionBackend, BlockSettings, Gradients

_EFFICIENT_LSE_ALIGNMENT = 32
_EFFICIENT_BIAS_ALIGNMENT = 16


class CudaFlashBackend(AttentionBackend):
    """FlashAttention 2 as built into torch; bf16 and fp16."""

    name = "flash SDPA"
    supports_bias = False
    native_gqa = True

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, settings: BlockSettings) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, settings.is_causal, False, scale=settings.scale
        )
        return out, lse

    def _backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, settings: BlockSettings
    ) -> Gradients:
        no_dropout_state = torch.empty(2, dtype=torch.uint64, device=q.device)
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad_out,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            settings.is_causal,
            no_dropout_state,
            torch.empty((), dtype=torch.uint64, device=q.device),
            scale=settings.scale,
        )
        return grad_q, grad_k, grad_v


class CudnnBackend(AttentionBackend):
    """Attention of cuDNN; the fastest on Hopper for bf16 and fp16."""

    name = "cuDNN SDPA"
    supports_bias = False

    def __init__(self, *, native_gqa: bool) -> None:
        self.native_gqa = native_gqa
        self._lse_shape: tuple[int, ...] = ()
        """Trailing dims that this torch's forward adds to the log-sum-exp and its backward expects: () or (1,)."""

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, settings: BlockSettings) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            _readable(q),
            _readable(k),
            _readable(v),
            None,
            True,
            0.0,
            settings.is_causal,
            False,
            scale=settings.scale,
        )
        self._lse_shape = tuple(lse.shape[3:])
        return out, lse.reshape(q.shape[:3])

    def _backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, settings: BlockSettings
    ) -> Gradients:
        no_dropout_state = torch.zeros((), dtype=torch.int64, device=q.device)
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            _readable(grad_out),
            _readable(q),
            _readable(k),
            _readable(v),
            _readable(out),
            lse.reshape(*lse.shape, *self._lse_shape).contiguous(),
            no_dropout_state,
            no_dropout_state,
            None,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            settings.is_causal,
            scale=settings.scale,
        )
        return grad_q, grad_k, grad_v


def _readable(tensor: Tensor) -> Tensor:
    """Copy what a kernel cannot read where it lies: it needs the numbers of a head side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class CudaEfficientBackend(AttentionBackend):
    """Memory-efficient attention of torch: every dtype, and the only fused CUDA kernel here that takes a bias."""

    name = "efficient SDPA"

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, settings: BlockSettings) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, _aligned_bias(settings.bias, q), True, 0.0, settings.is_causal, scale=settings.scale
        )
        return out, lse[:, :, : q.shape[2]]

    def _backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, settings: BlockSettings
    ) -> Gradients:
        no_dropout_state = torch.zeros((), dtype=torch.int64, device=q.device)
        padding = -lse.shape[2] % _EFFICIENT_LSE_ALIGNMENT
        grad_q, grad_k, grad_v, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad_out,
            q,
            k,
            v,
            _aligned_bias(settings.bias, q),
            out,
            functional.pad(lse, (0, padding), value=math.inf).contiguous(),
            no_dropout_state,
            no_dropout_state,
            0.0,
            [True, True, True, False],
            settings.is_causal,
            scale=settings.scale,
        )
        return grad_q, grad_k, grad_v


def _aligned_bias(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """The bias for every head, its rows starting at the alignment that the kernel asks for."""
    if bias is None:
        return None
    keys = bias.shape[-1]
    padded = functional.pad(bias, (0, -keys % _EFFICIENT_BIAS_ALIGNMENT))
    return padded[..., :keys].expand(q.shape[0], q.shape[1], -1, -1)


class FlashAttnPackageBackend(AttentionBackend):
    """Kernels of the flash-attn package (2.7 or newer); bf16 and fp16."""

    name = "flash-attn"
    supports_bias = False
    native_gqa = True

    def __init__(self) -> None:
        self._functions = importlib.import_module("flash_attn.flash_attn_interface")

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, settings: BlockSettings) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._functions._flash_attn_forward(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            dropout_p=0.0,
            softmax_scale=settings.scale,
            causal=settings.is_causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            return_softmax=False,
        )
        return out.transpose(1, 2), lse

    def _backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, settings: BlockSettings
    ) -> Gradients:
        tensors = [_readable(tensor.transpose(1, 2)) for tensor in (grad_out, q, k, v, out)]
        grads = [tensor.new_empty(tensor.shape) for tensor in tensors[1:4]]
        self._functions._flash_attn_backward(
            *tensors,
            lse.contiguous(),
            *grads,
            dropout_p=0.0,
            softmax_scale=settings.scale,
            causal=settings.is_causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=False,
        )
        grad_q, grad_k, grad_v = (grad.transpose(1, 2) for grad in grads)
        return grad_q, grad_k, grad_v


def has_flash_attn_package() -> bool:
    """Whether the flash-attn package can be imported and offers the two functions used here."""
    try:
        functions = importlib.import_module("flash_attn.flash_attn_interface")
    except ImportError:  # absent, or built for another torch or CUDA
        return False
    return hasattr(functions, "_flash_attn_forward") and hasattr(functions, "_flash_attn_backward")
