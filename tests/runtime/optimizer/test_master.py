"""fp32 sums of bf16 gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="the runtime's tests need the [train] extra")

import torch
from torch import Tensor

from hpjob.runtime.optimizer.master import MasterWeight, multiplies_to_single


def test_a_single_gradient_is_kept_as_it_came() -> None:
    master = MasterWeight(torch.zeros(4))
    gradient = torch.ones(4, dtype=torch.bfloat16)
    master.add(gradient)
    assert master.gradient is gradient


def test_small_gradients_are_not_lost_in_the_sum() -> None:
    master = MasterWeight(torch.zeros(1))
    for value in (256.0, 0.5, 0.5):
        master.add(torch.full((1,), value, dtype=torch.bfloat16))
    assert master.gradient is not None
    assert master.gradient.item() == 257.0
    # Negative control: bf16 itself would have dropped both halves.
    assert (torch.full((1,), 256.0, dtype=torch.bfloat16) + 0.5 + 0.5).item() == 256.0


def test_a_gradient_that_ranks_sum_is_single_precision_at_once() -> None:
    master = MasterWeight(torch.zeros(2), needs_single=True)
    master.add(torch.ones(2, dtype=torch.bfloat16))
    assert master.gradient is not None
    assert master.gradient.dtype is torch.float32


@pytest.fixture
def device_that_multiplies_to_single(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products of bf16 matrices in fp32, which a CPU does not have."""

    def mm(left: Tensor, right: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        return left.to(out_dtype) @ right.to(out_dtype)

    def addmm(total: Tensor, left: Tensor, right: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert out.dtype is total.dtype is out_dtype
        return out.copy_(total + mm(left, right, out_dtype=out_dtype))

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    multiplies_to_single.cache_clear()
    yield
    multiplies_to_single.cache_clear()


def products(master: MasterWeight) -> Tensor:
    """Sum of 1 + 2^-10 and 1, the first of which bf16 does not hold."""
    for parts in ([1.0, 2.0**-10], [1.0, 0.0]):
        column = torch.tensor(parts, dtype=torch.bfloat16)[:, None]
        master.add_product(torch.ones_like(column), column)
    assert master.gradient is not None
    return master.gradient


@pytest.mark.usefixtures("device_that_multiplies_to_single")
def test_products_reach_the_sum_without_rounding() -> None:
    assert products(MasterWeight(torch.zeros(1, 1))).item() == 2 + 2.0**-10


def test_products_are_rounded_where_the_device_has_none_in_single_precision() -> None:
    total = products(MasterWeight(torch.zeros(1, 1)))
    assert total.dtype is torch.float32
    assert total.item() == 2


@pytest.mark.usefixtures("device_that_multiplies_to_single")
def test_a_sum_that_a_gradient_began_goes_on_in_single_precision() -> None:
    master = MasterWeight(torch.zeros(1, 1))
    master.add(torch.ones(1, 1, dtype=torch.bfloat16))
    assert products(master).item() == 3 + 2.0**-10
