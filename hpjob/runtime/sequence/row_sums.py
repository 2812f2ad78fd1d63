"""Sums and merges of rows in one pass over memory: compiled loops on CUDA, plain torch elsewhere.

Everything is computed in fp32 (fp64 for fp64) and rounded once, when it is written. Tensors have the shape
(batch, rows, heads, head_dim), weights (batch, rows, heads); they may be slices of rows and of heads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache

import torch
from torch import Tensor

from hpjob.runtime.sequence.message_buffers import MessageBuffers

_COMPILED_DEVICES = ("cuda",)
_DIMS = 4
_VECTOR = 16
"""Elements. Code that knows strides as multiples of it moves 16 bytes at a time."""


def sum_dtype(*tensors: Tensor) -> torch.dtype:
    """What sums of such tensors are kept in."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def accumulate(total: Tensor, part: Tensor) -> None:
    """``total += part``."""
    _run(_accumulate, total, part)


def write_sum(out: Tensor, first: Tensor, second: Tensor) -> None:
    """``out = first + second``; ``out`` shares no memory with them."""
    _run(_write_sum, out, first, second)


def write_copy(out: Tensor, part: Tensor) -> None:
    """``out = part``; torch's own copy takes twice as long where heads are a slice."""
    _run(_write_copy, out, part)


def rescale_and_add(total: Tensor, weight: Tensor, part: Tensor, part_weight: Tensor) -> None:
    """``total = weight * total + part_weight * part``."""
    _run(_rescale_and_add, total, weight, part, part_weight)


def write_weighted_sum(out: Tensor, first: Tensor, first_weight: Tensor, second: Tensor, second_weight: Tensor) -> None:
    """``out = first_weight * first + second_weight * second``; ``out`` shares no memory with them."""
    _run(_write_weighted_sum, out, first, first_weight, second, second_weight)


def _accumulate(total: Tensor, part: Tensor) -> None:
    dtype = sum_dtype(total, part)
    total.copy_(total.to(dtype) + part.to(dtype))


def _write_sum(out: Tensor, first: Tensor, second: Tensor) -> None:
    dtype = sum_dtype(first, second)
    out.copy_(first.to(dtype) + second.to(dtype))


def _write_copy(out: Tensor, part: Tensor) -> None:
    out.copy_(part)


def _rescale_and_add(total: Tensor, weight: Tensor, part: Tensor, part_weight: Tensor) -> None:
    dtype = sum_dtype(total, part)
    total.copy_(total.to(dtype) * weight[..., None] + part.to(dtype) * part_weight[..., None])


def _write_weighted_sum(
    out: Tensor, first: Tensor, first_weight: Tensor, second: Tensor, second_weight: Tensor
) -> None:
    dtype = sum_dtype(first, second)
    out.copy_(first.to(dtype) * first_weight[..., None] + second.to(dtype) * second_weight[..., None])


def _run(function: Callable[..., None], *tensors: Tensor) -> None:
    with torch.no_grad():
        if not _is_compiled_for(tensors):
            function(*tensors)
            return
        compiled = _compiled(function, tuple((tensor.dtype, *tensor.shape[2:]) for tensor in tensors))
        # Row by row of the batch: with two sizes that are not constant, fewer strides would be known.
        for index in range(tensors[0].shape[0]):
            compiled(*(_known_strides(tensor[index]) for tensor in tensors))


def _is_compiled_for(tensors: tuple[Tensor, ...]) -> bool:
    """Odd sizes are left to torch: they occur in small models only."""
    rows = [tensor for tensor in tensors if tensor.dim() == _DIMS]
    return tensors[0].device.type in _COMPILED_DEVICES and all(
        tensor.stride(-1) == 1 and all(stride % _VECTOR == 0 for stride in tensor.stride()[1:-1]) for tensor in rows
    )


def _known_strides(tensor: Tensor) -> Tensor:
    """Compiled for any number of rows."""
    # ``data``: a tensor that autograd knows as a view of a larger one would be compiled for that very view.
    plain = tensor.detach().data
    torch._dynamo.maybe_mark_dynamic(plain, 0)
    return plain


@cache
def _compiled(function: Callable[..., None], signature: tuple[Hashable, ...]) -> Callable[..., None]:
    """The function for tensors of these dtypes and sizes; any number of rows at any distance."""

    def with_checked_strides(*tensors: Tensor) -> None:
        # Strides are not constants of the compiled code, but what was asked about them is.
        for tensor in tensors:
            if tensor.dim() == _DIMS - 1:
                torch._check(tensor.stride(0) % _VECTOR == 0)  # type: ignore[no-untyped-call]
        function(*tensors)

    # How often it may be compiled is counted by code object.
    code = with_checked_strides.__code__
    with_checked_strides.__code__ = code.replace(co_name=f"{function.__name__}_{len(signature)}")
    compiled: Callable[..., None] = torch.compile(with_checked_strides)
    return compiled


class RowSum:
    """Sum of parts of the same rows. A single part stays as it was computed; sums are fp32.

    Args:
        buffers: Memory of sums; what is given back to them when it was added.
    """

    def __init__(self, buffers: MessageBuffers, part: Tensor | None = None) -> None:
        self._buffers = buffers
        self.value = part

    def add(self, part: Tensor | None) -> None:
        """Add a part, which must not be used afterwards if it is a buffer; None adds nothing."""
        if self.value is None or part is None:
            self.value = part if self.value is None else self.value
            return
        value, dtype = self.value, sum_dtype(self.value, part)
        if self._is_writable(value, dtype):
            accumulate(value, part)
        elif self._is_writable(part, dtype):
            accumulate(part, value)
            self.value = part
        else:
            self.value = self._buffers.take(value.shape, dtype, value.device)
            write_sum(self.value, value, part)
        self._buffers.give_back(*(tensor for tensor in (value, part) if tensor is not self.value))

    def _is_writable(self, tensor: Tensor, dtype: torch.dtype) -> bool:
        return tensor.dtype == dtype and self._buffers.owns(tensor)
