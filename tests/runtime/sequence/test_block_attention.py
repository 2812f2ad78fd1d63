"""Kernels of one block: output, log-sum-exp, and gradients from whole-row statistics."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hpjob.runtime.sequence.backend_choice import choose_backend
from hpjob.runtime.sequence.block_attention import AttentionBackend, BlockSettings, CpuFlashBackend, MathBackend
from hpjob.runtime.sequence.cuda_attention import (
    CudaEfficientBackend,
    CudaFlashBackend,
    CudnnBackend,
    FlashAttnPackageBackend,
    has_flash_attn_package,
)
from hpjob.runtime.sequence.flash_attn_4 import FlashAttn4Backend, flash_attn_4, has_flash_attn_4
from hpjob.runtime.sequence.sequence_mask import MASKED_SCORE, SequenceMask, document_ids_from_position_ids
from tests.runtime.sequence.attention_reference import allowed_keys, full_attention, make_inputs, relative_error

SHAPE = (2, 4, 2, 64, 16)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA_BACKENDS = [CudaFlashBackend(), CudnnBackend(native_gqa=False), CudaEfficientBackend()]


def errors_of_two_blocks(
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: str,
    *,
    masked: bool,
    shape: tuple[int, int, int, int, int] = SHAPE,
) -> list[float]:
    """Attention of all queries to the first and to the second half of the keys, merged; errors against the whole."""
    q, k, v, grad_out = (tensor.to(device) for tensor in make_inputs(shape, dtype))
    length, half = shape[3], shape[3] // 2
    ids = torch.arange(length).ge(20).long().expand(shape[0], -1) if masked else None
    expected = full_attention(q.cpu(), k.cpu(), v.cpu(), grad_out.cpu(), document_ids=ids)
    scale = shape[4] ** -0.5
    own = slice(half, length)

    def settings(queries: slice, keys: slice) -> BlockSettings:
        if not masked:
            return BlockSettings(scale=scale, is_causal=queries == keys)
        mask = SequenceMask(document_ids=None if ids is None else ids.to(device))
        position = torch.arange(length, device=device)
        return BlockSettings(scale=scale, bias=mask.bias(position[queries], position[keys], dtype))

    early = slice(0, half)
    blocks = [(own, own), (own, early)]
    parts = [backend.forward(q[:, :, a], k[:, :, b], v[:, :, b], settings(a, b)) for a, b in blocks]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(part.float() * torch.exp(part_lse - lse)[..., None] for part, part_lse in parts)
    assert isinstance(out, torch.Tensor)
    grads = [
        backend.backward(grad_out[:, :, a], q[:, :, a], k[:, :, b], v[:, :, b], out.to(dtype), lse, settings(a, b))
        for a, b in blocks
    ]
    early_out, early_lse = backend.forward(q[:, :, early], k[:, :, early], v[:, :, early], settings(early, early))
    early_grads = backend.backward(
        grad_out[:, :, early],
        q[:, :, early],
        k[:, :, early],
        v[:, :, early],
        early_out,
        early_lse,
        settings(early, early),
    )
    dq = torch.cat([early_grads[0].float(), grads[0][0].float() + grads[1][0].float()], 2)
    dk, dv = (torch.cat([early_grads[i].float() + grads[1][i].float(), grads[0][i].float()], 2) for i in (1, 2))
    whole_out = torch.cat([early_out.float(), out], 2)
    return [relative_error(a.cpu(), e) for a, e in zip((whole_out, dq, dk, dv), expected, strict=True)]


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "packed"])
@pytest.mark.parametrize("backend", [MathBackend(), CpuFlashBackend()], ids=lambda b: b.name)
def test_merged_blocks_equal_whole_rows(backend: AttentionBackend, masked: bool) -> None:
    errors = errors_of_two_blocks(backend, torch.float32, "cpu", masked=masked)
    assert max(errors) <= 1e-6


@pytest.mark.parametrize("backend", [MathBackend(), CpuFlashBackend()], ids=lambda b: b.name)
def test_bf16_blocks(backend: AttentionBackend) -> None:
    assert max(errors_of_two_blocks(backend, torch.bfloat16, "cpu", masked=False)) <= 8e-3


@needs_cuda
@pytest.mark.parametrize("backend", CUDA_BACKENDS, ids=lambda b: b.name)
def test_cuda_blocks_bf16(backend: AttentionBackend) -> None:
    assert max(errors_of_two_blocks(backend, torch.bfloat16, "cuda", masked=False)) <= 8e-3


@needs_cuda
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "packed"])
def test_cuda_blocks_fp32(masked: bool) -> None:
    assert max(errors_of_two_blocks(CudaEfficientBackend(), torch.float32, "cuda", masked=masked)) <= 1e-4


@pytest.mark.parametrize(
    ("backend", "kv_heads"),
    [
        (CudaFlashBackend(), 2),
        (CudnnBackend(native_gqa=True), 2),
        (CudnnBackend(native_gqa=False), 4),
        (CudaEfficientBackend(), 4),
    ],
)
def test_this_torch_knows_the_calls_of_the_cuda_kernels(backend: AttentionBackend, kv_heads: int) -> None:
    """Shapes alone, on the meta device: names, arguments and results are right without a GPU."""
    q = torch.empty(2, 4, 32, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, kv_heads, 16, 64, dtype=torch.bfloat16, device="meta")
    settings = BlockSettings(scale=0.1)
    out, lse = backend.forward(q, k, k, settings)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    grads = backend.backward(out, q, k, k, out, lse, settings)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]


@needs_cuda
def test_cuda_choice_takes_the_tensors_that_it_was_made_for() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        q, k, _, _ = (tensor.cuda() for tensor in make_inputs(SHAPE, dtype))
        for needs_bias in (False, True):
            choice = choose_backend(q, k, needs_bias=needs_bias)
            assert max(errors_of_two_blocks(choice.backend, dtype, "cuda", masked=needs_bias)) <= 8e-3


@needs_cuda
@pytest.mark.parametrize("head_dim", [64, 128])
def test_flash_attn_4_kernels_merge_like_whole_attention(head_dim: int) -> None:
    if not has_flash_attn_4():
        pytest.skip("flash-attn-4 is not installed")
    shape = (2, 4, 2, 256, head_dim)
    assert max(errors_of_two_blocks(FlashAttn4Backend(), torch.bfloat16, "cuda", masked=False, shape=shape)) <= 8e-3


def stand_in_for_flash_attn() -> types.ModuleType:
    """A module with the two functions of flash-attn 2.7 in their (batch, sequence, heads, head_dim) layout."""
    math_backend = MathBackend()

    def forward(q: Any, k: Any, v: Any, *, softmax_scale: float, causal: bool, **_: Any) -> Any:
        settings = BlockSettings(scale=softmax_scale, is_causal=causal)
        out, lse = math_backend.forward(*(t.transpose(1, 2) for t in (q, k, v)), settings)
        return out.transpose(1, 2), lse, None, None

    def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *grads: Any, **options: Any) -> None:
        assert lse.is_contiguous()
        settings = BlockSettings(scale=options["softmax_scale"], is_causal=options["causal"])
        first = [t.transpose(1, 2) for t in (dout, q, k, v, out)]
        for target, grad in zip(grads, math_backend.backward(*first, lse, settings), strict=True):
            target.copy_(grad.transpose(1, 2))

    module = types.ModuleType("flash_attn.flash_attn_interface")
    module._flash_attn_forward = forward  # type: ignore[attr-defined]
    module._flash_attn_backward = backward  # type: ignore[attr-defined]
    return module


def is_loadable(tensor: torch.Tensor) -> bool:
    """Whether every row of head_dim numbers starts at 16 bytes, at a distance of its own from the last."""
    units = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
    return tensor.stride(-1) == 1 and all(unit and unit % 16 == 0 for unit in (*units, tensor.data_ptr()))


def stand_in_for_flash_attn_4() -> types.ModuleType:
    """A module with the two functions of flash-attn-4, which returns more results in newer versions."""
    math_backend = MathBackend()

    def forward(q: Any, k: Any, v: Any, *, softmax_scale: float, causal: bool, return_lse: bool) -> Any:
        assert all(is_loadable(t) for t in (q, k, v))
        assert return_lse
        settings = BlockSettings(scale=softmax_scale, is_causal=causal)
        out, lse = math_backend.forward(*(t.transpose(1, 2) for t in (q, k, v)), settings)
        return out.transpose(1, 2).contiguous(), lse.contiguous(), None, None, None

    def backward(q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, **options: Any) -> Any:
        assert all(is_loadable(t) for t in (q, k, v, out, dout))
        assert lse.is_contiguous()
        settings = BlockSettings(scale=options["softmax_scale"], is_causal=options["causal"])
        grads = math_backend.backward(*(t.transpose(1, 2) for t in (dout, q, k, v, out)), lse, settings)
        return tuple(grad.transpose(1, 2).contiguous() for grad in grads)

    module = types.ModuleType("flash_attn.cute.interface")
    module._flash_attn_fwd = forward  # type: ignore[attr-defined]
    module._flash_attn_bwd = backward  # type: ignore[attr-defined]
    return module


@pytest.fixture
def flash_attn_4_stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", stand_in_for_flash_attn_4())
    has_flash_attn_4.cache_clear()
    yield
    has_flash_attn_4.cache_clear()


def test_without_flash_attn_4_it_is_not_chosen() -> None:
    has_flash_attn_4.cache_clear()
    assert not has_flash_attn_4()


@pytest.mark.usefixtures("flash_attn_4_stand_in")
def test_flash_attn_4_is_called_in_its_layout() -> None:
    assert has_flash_attn_4()
    assert max(errors_of_two_blocks(FlashAttn4Backend(), torch.float32, "cpu", masked=False)) <= 1e-6


@pytest.mark.usefixtures("flash_attn_4_stand_in")
def test_flash_attn_4_is_one_node_of_a_compiled_graph() -> None:
    q, k, v, grad_out = (tensor.transpose(1, 2).requires_grad_() for tensor in make_inputs(SHAPE, torch.float32))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_4(q * 1.0, k, v, 0.25, True)[0]

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    grads = torch.autograd.grad(compiled(q, k, v), (q, k, v), grad_out)
    expected = torch.autograd.grad(attend(q, k, v), (q, k, v), grad_out)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


@pytest.mark.usefixtures("flash_attn_4_stand_in")
def test_flash_attn_4_reads_some_of_the_heads_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["flash_attn.cute.interface"]
    read: list[int] = []
    forward = module._flash_attn_fwd

    def noting(*tensors: torch.Tensor, **options: Any) -> Any:
        read[:] = [tensor.data_ptr() for tensor in tensors]
        return forward(*tensors, **options)

    monkeypatch.setattr(module, "_flash_attn_fwd", noting)
    rows = torch.randn(1, 64, 4, 16).transpose(1, 2)
    some = rows[:, 1:3]
    FlashAttn4Backend().forward(some, some, some, BlockSettings(scale=0.25))
    assert read == [some.data_ptr()] * 3
    spread = rows[:, :1].expand(-1, 4, -1, -1)
    unaligned = torch.randn(1 + rows.numel())[1:].view_as(rows)
    FlashAttn4Backend().forward(spread, unaligned, unaligned, BlockSettings(scale=0.25))
    assert not {spread.data_ptr(), unaligned.data_ptr()} & set(read)


def test_flash_attn_package_is_called_in_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_flash_attn_package()
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", stand_in_for_flash_attn())
    assert has_flash_attn_package()
    assert max(errors_of_two_blocks(FlashAttnPackageBackend(), torch.float32, "cpu", masked=False)) <= 1e-6


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float32, "cpu flash SDPA"), (torch.bfloat16, "cpu flash SDPA"), (torch.float64, "math")],
)
def test_choice_on_cpu_says_what_and_why(dtype: torch.dtype, name: str) -> None:
    q, k, _, _ = make_inputs(SHAPE, dtype)
    choice = choose_backend(q, k)
    assert choice.backend.name == name
    assert str(choice).startswith(f"{name} (")


def test_mask_bias_is_causal_inside_documents_and_window() -> None:
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])
    ids = document_ids_from_position_ids(position_ids)
    bias = SequenceMask(document_ids=ids, sliding_window=2).bias(torch.arange(8), torch.arange(8), torch.float32)
    assert torch.equal(bias == 0, allowed_keys(8, ids, 2))
    assert set(bias.unique().tolist()) == {0.0, MASKED_SCORE}
    assert torch.finfo(torch.float16).min < MASKED_SCORE
