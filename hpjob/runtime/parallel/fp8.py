"""Matrix products of linear layers in 8-bit floating point, through torchao.

Inputs, weights and output gradients are scaled by their largest element in every product ("dynamic, tensor-wise")
and rounded to e4m3; sums and results stay in 16 or 32 bits, and so do the master weights. Micikevicius
et al., "FP8 formats for deep learning", 2022.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hpjob.core.errors import EnvironmentProblemError

ALIGNMENT = 16
"""Dims of an 8-bit product are multiples of it."""


class Fp8Product:
    """``x W^T`` in 8 bits, forward and backward.

    Args:
        device: GPUs multiply in 8 bits; a CPU computes the same roundings in 32.

    Raises:
        EnvironmentProblemError: torchao is missing, or the GPU has no 8-bit products.
    """

    def __init__(self, device: torch.device) -> None:
        _check(device)
        from torchao.float8 import Float8LinearConfig  # noqa: PLC0415
        from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args  # noqa: PLC0415

        self._config = Float8LinearConfig(emulate=device.type == "cpu", pad_inner_dim=True)
        with torch.device("meta"):
            self._products = Float8Linear(ALIGNMENT, ALIGNMENT, bias=False, config=self._config).linear_mm_config
        self._function: Any = matmul_with_hp_or_float8_args

    def __call__(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """Multiply (..., in_features) with (out_features, in_features)."""
        result: Tensor = self._function.apply(inputs, weight.t(), self._products, self._config)
        # torchao returns a view, which a tensor-parallel sum could not change in place.
        return result if torch.compiler.is_compiling() else result.clone()


def _check(device: torch.device) -> None:
    if find_spec("torchao") is None:
        raise EnvironmentProblemError("use_fp8 needs torchao", hint="install it with: pip install 'hpjob[fp8]'")
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 9):
        raise EnvironmentProblemError(
            f"{torch.cuda.get_device_name(device)} has no 8-bit products",
            hint="leave use_fp8 out, or use GPUs of the Ada, Hopper or later kinds",
        )
