"""The one-pass update against torch's AdamW; the compiler is left out, the arithmetic is the same."""

from collections.abc import Iterator

import pytest
import torch

from hpjob.recipe.model import OptimizerSettings
from hpjob.runtime.optimizer.fused_update import FusedUpdate, rows

SETTINGS = OptimizerSettings(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)


@pytest.fixture(autouse=True)
def _without_compiler() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def test_three_steps_equal_adamw_with_clipped_gradients() -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(3, 5, generator=generator)
    reference = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([reference], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    master, first, second = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    weight = start.bfloat16()
    for step in (1, 2, 3):
        gradient = torch.randn(3, 5, generator=generator)
        reference.grad = gradient * 0.25
        optimizer.step()
        update = FusedUpdate(SETTINGS, 1e-2, step, torch.tensor(0.25))
        update.apply(master, first, second, gradient, weight, decays=True)
    torch.testing.assert_close(master, reference.detach(), rtol=1e-6, atol=1e-7)
    assert torch.equal(weight, master.bfloat16())


def test_vectors_do_not_decay() -> None:
    master = torch.full((4,), 2.0)
    moments = torch.zeros(4), torch.zeros(4)
    update = FusedUpdate(SETTINGS, 1e-2, 1, torch.tensor(1.0))
    update.apply(master, *moments, torch.zeros(4), None, decays=False)
    assert torch.equal(master, torch.full((4,), 2.0))
    update.apply(master, *moments, torch.zeros(4), None, decays=True)
    assert master[0].item() == pytest.approx(2.0 * (1 - 1e-2 * 0.1))


def test_a_bf16_gradient_is_read_and_left_alone() -> None:
    gradient = torch.full((4,), 3.0, dtype=torch.bfloat16)
    master = torch.zeros(4)
    FusedUpdate(SETTINGS, 1e-2, 1, torch.tensor(0.1)).apply(
        master, torch.zeros(4), torch.zeros(4), gradient, None, decays=False
    )
    assert torch.equal(gradient, torch.full((4,), 3.0, dtype=torch.bfloat16))
    # The first step of Adam has the size of the rate, whatever the gradient.
    assert master[0].item() == pytest.approx(-1e-2, rel=1e-4)


def test_the_compiler_is_shown_sizes_that_are_multiples_of_a_vector() -> None:
    """A size that it knows nothing of is read element by element on a GPU, at half the speed."""
    weight = torch.arange(8192.0).view(4, 2048)
    assert rows(weight).shape == (8, 1024)
    assert rows(weight).data_ptr() == weight.data_ptr()
    assert rows(torch.zeros(3, 5)).shape == (15,)
