"""fp32 sums of bf16 gradients."""

import torch

from hpjob.runtime.optimizer.master import MasterWeight


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
