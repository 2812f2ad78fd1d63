"""Sums of weight gradients that FSDP2 reduces once a step, made by the products of the backward passes themselves.

FSDP2 would turn the gradient of each microbatch from bf16 into fp32 and add it, which reads and writes them twice.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from hpjob.runtime.optimizer.master import add_single_product, multiplies_to_single
from hpjob.runtime.weight_gradients import GradientTarget, whole_like


class ShardedSum:
    """Where FSDP2 collects the gradients of one weight before it reduces them.

    Args:
        kept: FSDP2's own record of the parameter.
    """

    def __init__(self, kept: Any) -> None:
        self._kept = kept

    def add_product(self, gradient: Tensor, inputs: Tensor) -> None:
        """Add ``gradient^T inputs``; (tokens, outputs) and (tokens, inputs)."""
        weight: nn.Parameter = self._kept._unsharded_param
        if not multiplies_to_single(gradient.device, gradient.dtype):
            GradientTarget(weight).add_product(gradient, inputs)
            return
        before = self._kept.unsharded_accumulated_grad
        local = before.to_local() if isinstance(before, DTensor) else before
        after = add_single_product(local, gradient, inputs)
        if before is None:
            self._kept.unsharded_accumulated_grad = whole_like(weight, after)


def sharded_sums(units: list[FSDPModule]) -> dict[nn.Parameter, ShardedSum]:
    """Return the sums of all parameters of FSDP2 units; none where this torch keeps them in another way."""
    groups = [getattr(fully_shard.state(unit), "_fsdp_param_group", None) for unit in units]  # type: ignore[attr-defined]
    kept = [each for group in groups if group is not None for each in group.fsdp_params]
    if not all(hasattr(each, "unsharded_accumulated_grad") for each in kept):
        return {}
    return {getattr(each._module_info.module, each._module_info.param_name): ShardedSum(each) for each in kept}
