"""Our attention inside transformers' decoder layers, through its attention interface and without edited model code.

``install_attention`` gives each attention module its own kernel object, which carries the process group. The
functions registered with transformers hold no state: they look the kernel up on the module that calls them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface

from hpjob.core.errors import UserInputError
from hpjob.runtime.sequence.backend_choice import choose_backend
from hpjob.runtime.sequence.local_attention import local_attention
from hpjob.runtime.sequence.ring import Ring
from hpjob.runtime.sequence.ring_attention import ring_attention
from hpjob.runtime.sequence.sequence_mask import sequence_mask
from hpjob.runtime.sequence.ulysses import ulysses_attention, ulysses_kv_heads

_KERNEL_ATTRIBUTE = "hpjob_attention_kernel"


class AttentionKernel(Protocol):
    """Causal attention of this rank's part of the sequence.

    Attributes:
        name: The sequence parallelism mode, or ``sdpa``.
    """

    name: str

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None,
        document_ids: Tensor | None,
        sliding_window: int | None,
    ) -> Tensor:
        """q (batch, heads, local sequence, head_dim); k, v with kv_heads; document_ids (batch, whole sequence)."""

    def describe(self, q: Tensor, k: Tensor, *, needs_bias: bool = False) -> str:
        """Kernel that such tensors get, and why; only shapes, dtype and device count."""


class LocalAttentionKernel:
    """The whole sequence is on this rank."""

    name = "sdpa"

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None,
        document_ids: Tensor | None,
        sliding_window: int | None,
    ) -> Tensor:
        return local_attention(q, k, v, scale=scale, document_ids=document_ids, sliding_window=sliding_window)

    def describe(self, q: Tensor, k: Tensor, *, needs_bias: bool = False) -> str:
        return str(choose_backend(q, k, needs_bias=needs_bias))


class RingAttentionKernel:
    """The sequence is spread in zigzag order over a ring.

    Args:
        ring: The ranks of the sequence-parallel group.
    """

    name = "ring_attn"

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None,
        document_ids: Tensor | None,
        sliding_window: int | None,
    ) -> Tensor:
        mask = sequence_mask(document_ids, sliding_window, q.shape[2] * self._ring.size)
        return ring_attention(q, k, v, self._ring, scale=scale, mask=mask)

    def describe(self, q: Tensor, k: Tensor, *, needs_bias: bool = False) -> str:
        return f"zigzag ring over {self._ring.size} ranks, {choose_backend(q, k, needs_bias=needs_bias)}"


class UlyssesAttentionKernel:
    """The sequence is spread contiguously; heads are scattered around attention.

    Args:
        group: The sequence-parallel process group.
    """

    name = "all_to_all"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None,
        document_ids: Tensor | None,
        sliding_window: int | None,
    ) -> Tensor:
        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return local_attention(
                query, key, value, scale=scale, document_ids=document_ids, sliding_window=sliding_window
            )

        return ulysses_attention(q, k, v, self._group, attention)

    def describe(self, q: Tensor, k: Tensor, *, needs_bias: bool = False) -> str:
        size = dist.get_world_size(self._group)
        travelling = ulysses_kv_heads(q.shape[1], k.shape[1], size)
        inside = choose_backend(q[:, : q.shape[1] // size], q[:, : travelling // size], needs_bias=needs_bias)
        return f"all-to-all over {size} ranks, {inside}"


def attention_forward(  # noqa: PLR0913  (the signature is transformers')
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    document_ids: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function in the form of transformers' attention interface.

    Args:
        module: The attention module, prepared by :func:`install_attention`.
        query: Shape (batch, heads, local sequence, head_dim), after the rotary embedding.
        key: Shape (batch, kv_heads, local sequence, head_dim).
        value: Shape of ``key``.
        attention_mask: Must be None: causality is implied, packed documents are given by ``document_ids``.
        scaling: Factor of the scores.
        dropout: Must be 0.
        sliding_window: Newest keys that a query sees.
        softcap: Must be None.
        document_ids: Shape (batch, whole sequence), natural order; handed to the decoder layer as a keyword.
        is_causal: Must not be False.

    Returns:
        Output of shape (batch, local sequence, heads, head_dim), and no attention weights.

    Raises:
        UserInputError: The model asks for what these kernels do not do.
    """
    kernel: AttentionKernel | None = getattr(module, _KERNEL_ATTRIBUTE, None)
    if kernel is None:
        raise RuntimeError(f"{type(module).__name__} uses an hpjob attention function without install_attention")
    wishes = {
        "an attention mask": attention_mask is not None,
        f"attention dropout {dropout}": dropout > 0,
        f"soft-capped scores ({softcap})": softcap is not None,
        "attention to later tokens": is_causal is False or not getattr(module, "is_causal", True),
    }
    for wish, is_asked in wishes.items():
        if is_asked:
            raise UserInputError(
                f"{type(module).__name__} asks for {wish}, which {kernel.name} attention does not compute",
                hint="leave padding to ignored labels, packed documents to document_ids, and set attention_dropout to "
                "0; models with soft-capped or two-sided attention are not supported",
            )
    out = kernel(query, key, value, scale=scaling, document_ids=document_ids, sliding_window=sliding_window)
    return out.transpose(1, 2).contiguous(), None


def attention_modules(module: nn.Module) -> Iterator[Any]:
    """Self-attention modules of transformers' decoder layers inside ``module``, itself included."""
    for candidate in module.modules():
        if all(hasattr(candidate, name) for name in ("config", "scaling", "num_key_value_groups")):
            yield candidate


def install_attention(module: nn.Module, kernel: AttentionKernel) -> int:
    """Make every attention module inside ``module`` use ``kernel``.

    The configs of these modules are switched to the kernel's registered name; layers that share a config object must
    all be installed.

    Args:
        module: A decoder layer or anything that contains some.
        kernel: Carries its own process group.

    Returns:
        How many attention modules were found.

    Raises:
        UserInputError: There was none.
    """
    registered = f"hpjob_{kernel.name}"
    AttentionInterface.register(registered, attention_forward)
    found = 0
    for attention in attention_modules(module):
        setattr(attention, _KERNEL_ATTRIBUTE, kernel)
        attention.config._attn_implementation = registered
        found += 1
    if not found:
        raise UserInputError(
            f"{type(module).__name__} contains no attention module that hpjob knows",
            hint="supported are decoder layers whose attention goes through transformers' attention interface",
        )
    return found


def describe_attention(module: nn.Module, dtype: torch.dtype, device: torch.device, *, needs_bias: bool = False) -> str:
    """Mode and kernel that the first attention module inside ``module`` uses, for the log.

    Returns:
        For example ``ring_attn: zigzag ring over 4 ranks, cuDNN SDPA (no flash-attn package; compute capability 9.0)``.
    """
    attention = next(attention_modules(module))
    kernel: AttentionKernel = getattr(attention, _KERNEL_ATTRIBUTE)
    heads = attention.config.num_attention_heads
    q = torch.empty(1, heads, 1, attention.head_dim, dtype=dtype, device=device)
    k = q[:, : heads // attention.num_key_value_groups]
    return f"{kernel.name}: {kernel.describe(q, k, needs_bias=needs_bias)}"
