"""Which attention kernel runs, and why.

The order is flash-attn when importable, else cuDNN or flash SDPA, else memory-efficient SDPA, else plain math.
Kernels are probed by what they can do with the tensors at hand, never by a version number.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hpjob.runtime.sequence.block_attention import AttentionBackend, CpuFlashBackend, MathBackend, has_cpu_flash
from hpjob.runtime.sequence.cuda_attention import (
    CudaEfficientBackend,
    CudaFlashBackend,
    CudnnBackend,
    FlashAttnPackageBackend,
    has_flash_attn_package,
)
from hpjob.runtime.sequence.flash_attn_4 import (
    FIRST_CAPABILITY,
    LARGEST_HEAD_DIM,
    FlashAttn4Backend,
    has_flash_attn_4,
)

_HALF_TYPES = (torch.bfloat16, torch.float16)
_CUDNN_FIRST_FROM = (9, 0)
"""Compute capability from which cuDNN's attention is the faster one; it is slower than flash on the A100."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendChoice:
    """A kernel and the reason in words, for the log."""

    backend: AttentionBackend
    reason: str

    def __str__(self) -> str:
        return f"{self.backend.name} ({self.reason})"


def choose_backend(q: Tensor, k: Tensor, *, needs_bias: bool = False) -> BackendChoice:
    """Fastest kernel that takes these tensors.

    Args:
        q: Shape (batch, heads, queries, head_dim); only shape, dtype and device count.
        k: Shape (batch, kv_heads, keys, head_dim).
        needs_bias: Packed documents or a sliding window are to be masked.
    """
    heads = (q.shape[1], k.shape[1], q.shape[-1])
    choice: BackendChoice = _choose(q.device.type, q.device.index, q.dtype, heads, needs_bias)
    return choice


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _choose(
    device_type: str, device_index: int | None, dtype: torch.dtype, heads: tuple[int, int, int], needs_bias: bool
) -> BackendChoice:
    """A constant to torch.compile, since the probes below cannot be traced."""
    return _choose_once(device_type, device_index, dtype, heads, needs_bias)


@functools.lru_cache(maxsize=256)
def _choose_once(
    device_type: str, device_index: int | None, dtype: torch.dtype, heads: tuple[int, int, int], needs_bias: bool
) -> BackendChoice:
    if device_type == "cuda":
        return _choose_cuda(torch.device(device_type, device_index or 0), dtype, heads, needs_bias)
    if device_type == "cpu" and dtype in (torch.float32, *_HALF_TYPES) and has_cpu_flash():
        return BackendChoice(backend=CpuFlashBackend(), reason="tensors on the CPU")
    return BackendChoice(backend=MathBackend(), reason=f"no fused kernel for {dtype} on {device_type}")


def _choose_cuda(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int], needs_bias: bool
) -> BackendChoice:
    if not needs_bias and dtype in _HALF_TYPES:
        for choice in _unmasked_cuda_candidates(device, dtype, heads):
            return choice
    reason = "packed documents or a sliding window need a bias" if needs_bias else f"{dtype}, head_dim {heads[2]}"
    if torch.backends.cuda.can_use_efficient_attention(_probe(device, dtype, heads, expand=True)):
        return BackendChoice(backend=CudaEfficientBackend(), reason=reason)
    return BackendChoice(backend=MathBackend(), reason=f"no fused kernel takes {reason}")


def _unmasked_cuda_candidates(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int]
) -> Iterator[BackendChoice]:
    capability = torch.cuda.get_device_capability(device)
    if capability >= FIRST_CAPABILITY and _suits_flash_attn_4(heads[2]) and has_flash_attn_4():
        yield BackendChoice(backend=FlashAttn4Backend(), reason="flash-attn-4 is importable")
    if has_flash_attn_package() and heads[2] % 8 == 0 and heads[2] <= 256:
        yield BackendChoice(backend=FlashAttnPackageBackend(), reason="flash-attn is importable")
    native = _probe(device, dtype, heads, expand=False)
    expanded = _probe(device, dtype, heads, expand=True)
    reason = f"no flash-attn package; compute capability {capability[0]}.{capability[1]}"
    cudnn_gqa = torch.backends.cuda.can_use_cudnn_attention(native)
    cudnn = cudnn_gqa or torch.backends.cuda.can_use_cudnn_attention(expanded)
    flash = heads[2] % 8 == 0 and torch.backends.cuda.can_use_flash_attention(native)
    if cudnn and (capability >= _CUDNN_FIRST_FROM or not flash):
        yield BackendChoice(backend=CudnnBackend(native_gqa=cudnn_gqa), reason=reason)
    if flash:
        yield BackendChoice(backend=CudaFlashBackend(), reason=reason)


def _suits_flash_attn_4(head_dim: int) -> bool:
    # Its backward pass in a fixed order was never tried here; torch's own kernels have one.
    return head_dim % 8 == 0 and head_dim <= LARGEST_HEAD_DIM and not torch.are_deterministic_algorithms_enabled()


def _probe(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int], *, expand: bool
) -> torch.backends.cuda.SDPAParams:
    """Tensors that want gradients, since some kernels take more head dims forward than backward."""
    num_heads, num_kv_heads, head_dim = heads
    q = torch.empty(1, num_heads, 128, head_dim, dtype=dtype, device=device, requires_grad=True)
    k = q if expand else torch.empty(1, num_kv_heads, 128, head_dim, dtype=dtype, device=device, requires_grad=True)
    return torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, False, not expand)
