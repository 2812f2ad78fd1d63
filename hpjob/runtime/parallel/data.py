"""Data parallelism and ZeRO, and when gradients are synchronised.

===== ========= ================== ===================== ================================
stage mesh      gradients reduced  master weights, fp32  held between microbatches
===== ========= ================== ===================== ================================
0     replicate after the last one whole                 whole weights and gradients
1     shard     after the last one sharded               whole weights and gradients
2     shard     after every one    sharded               whole weights, gradients' shards
3     shard     after every one    sharded               shards only
===== ========= ================== ===================== ================================

With ``zero_shard_size`` both axes of the mesh are above 1: gradients are reduced inside a group as above, and
summed across groups after the last microbatch. :mod:`hpjob.runtime.parallel.shared_weights` does all that; only with
``cpu_offload``, where the shards lie in the host's memory, it is FSDP2.

Gradients are summed, never averaged: the loss is already divided by the global number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from hpjob.plan.model import Plan
from hpjob.recipe.model import Precision
from hpjob.runtime.mesh import Mesh
from hpjob.runtime.model.stage import DecoderStage
from hpjob.runtime.moe.expert_parallel import ExpertParallelExperts
from hpjob.runtime.parallel.shared_weights import SharedWeights

COMPUTE_DTYPE: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Dtype of activations and of gathered parameters; shards and reductions are fp32."""


def shard_dim(local_shape: torch.Size, *, tp_dim: int | None, tp_even: bool, parts: int) -> int:
    """Return the dim that data parallelism cuts: 0, or 1 where two uneven cuts of dim 0 could not be described.

    Args:
        local_shape: Shape after the tensor-parallel cut.
        tp_dim: Dim of that cut; None = not cut.
        tp_even: Whether all tensor-parallel ranks have the same shape and it divides by ``parts``.
        parts: Number of shards.
    """
    doubly_uneven = tp_dim == 0 and not tp_even and parts > 1
    return 1 if doubly_uneven and len(local_shape) > 1 and local_shape[1] % parts == 0 else 0


def shard_stage(stage: DecoderStage, plan: Plan, mesh: Mesh, dims: Mapping[str, int]) -> None:
    """Apply FSDP2 to a stage on the meta device: one unit a decoder layer, one for
    its experts, one for the rest.

    That is so where the host keeps the shards; else the stage stays as it is.

    Args:
        stage: With whole parameters.
        plan: Its layout.
        mesh: The mesh of the run.
        dims: Along which each parameter is cut.
    """
    if not needs_fsdp(plan):
        return
    is_cuda = mesh.device_mesh.device_type == "cuda"
    policy = MixedPrecisionPolicy(
        param_dtype=COMPUTE_DTYPE[plan.precision], reduce_dtype=torch.float32, cast_forward_inputs=False
    )

    placements = {id(parameter): Shard(dims[name]) for name, parameter in stage.named_parameters()}

    def placement(parameter: nn.Parameter) -> Shard:
        return placements[id(parameter)]

    units: list[tuple[nn.Module, DeviceMesh]] = [
        (module, mesh.expert_fsdp_mesh) for module in stage.modules() if isinstance(module, ExpertParallelExperts)
    ]
    units += [(module, mesh.fsdp_mesh) for module in (*stage.decoder_layers, stage)]
    for module, unit_mesh in units:
        fully_shard(
            module,
            mesh=unit_mesh,
            reshard_after_forward=plan.zero_stage == 3,
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy(pin_memory=is_cuda),
            shard_placement_fn=placement,
        )
    for unit in fsdp_units(stage):
        unit.set_gradient_divide_factor(1.0)
        # A divide factor otherwise becomes a pre-multiplied sum, which gloo refuses.
        unit.set_force_sum_reduction_for_comms(True)


def needs_fsdp(plan: Plan) -> bool:
    """Whether FSDP2 shards the parameters, because it moves them from the host's memory."""
    return plan.cpu_offload


def shares_weights(plan: Plan, mesh: Mesh) -> bool:
    """Whether more than one rank, beside the tensor-parallel group, computes with these parameters, without FSDP2."""
    return not needs_fsdp(plan) and mesh.fsdp_mesh.size() > 1


def counting_group(plan: Plan, mesh: Mesh) -> dist.ProcessGroup | None:
    """Return a group of all ranks on which the count of a step's tokens does not wait for updated weights."""
    if not shares_weights(plan, mesh) or mesh.shard_size == 1:
        return None
    return mesh.groups.get([range(mesh.world_size)], "layers")


def parameter_shard_dim(parameter: nn.Parameter, parts: int) -> int:
    """Return the dim along which data parallelism is to cut a parameter that is not sharded yet."""
    if not isinstance(parameter, DTensor):
        return 0
    tp_placement = parameter.placements[0]
    tp_dim = tp_placement.dim if isinstance(tp_placement, Shard) else None
    tp_even = tp_dim is None or parameter.shape[tp_dim] % (parameter.device_mesh.size() * parts) == 0
    return shard_dim(parameter.to_local().shape, tp_dim=tp_dim, tp_even=tp_even, parts=parts)


def fsdp_units(stage: nn.Module) -> list[FSDPModule]:
    """Return the FSDP2 units of a stage."""
    return [module for module in stage.modules() if isinstance(module, FSDPModule)]


class CollectsGradient(Protocol):
    """A parameter with a sum of gradients of its own."""

    def collect_gradient(self) -> None:
        """Add what the last backward pass left."""


class GradientSync:
    """Tells a stage before each backward pass whether to reduce and, with FSDP2, to reshard.

    Args:
        stage: Whose gradients.
        plan: ZeRO stage.
        parameters: Of the stage, those that have a sum.
        shared: Reduces the gradients in place of FSDP2.
    """

    def __init__(
        self,
        stage: nn.Module,
        plan: Plan,
        parameters: Sequence[CollectsGradient] = (),
        shared: SharedWeights[Any] | None = None,
    ) -> None:
        self._parameters = parameters
        self._shared = shared
        self._units = fsdp_units(stage)
        self._every = plan.zero_stage >= 2
        self._reshard_every = plan.zero_stage == 3
        self._last: bool | None = None

    def before_backward(self, *, last: bool, deferred: bool = False) -> None:
        """Prepare for one backward pass.

        Args:
            last: It is the stage's last of this step.
            deferred: It leaves weight gradients for later, so nothing can be reduced yet.
        """
        if self._shared is not None:
            self._shared.begin(reduces=not deferred, is_last=last)
        if last is self._last or not self._units:
            return
        self._last = last
        self._units[0].set_is_last_backward(False)
        for unit in self._units:
            unit.set_requires_gradient_sync(last or (self._every and not deferred), recurse=False)
            # Across groups of shards, where parameters have copies, once a step is enough.
            unit.set_requires_all_reduce(last, recurse=False)
            unit.set_reshard_after_backward(last or self._reshard_every, recurse=False)

    def before_deferred(self, *, last: bool) -> None:
        """Prepare for the deferred weight gradients of one microbatch."""
        if self._shared is not None:
            self._shared.begin(reduces=True, is_last=last)

    def after_deferred(self, *, last: bool) -> None:
        """Take in deferred weight gradients of one microbatch; after the last ones, reduce everything."""
        self.after_backward()
        if self._units:
            self.before_backward(last=last, deferred=True)
            self._end_backward()

    def end_step(self) -> None:
        """Wait for the reductions that the last backward passes began; until now they ran beside other stages' work."""
        if self._shared is not None:
            self._shared.finish_step()
        if self._units:
            self._units[0].set_is_last_backward(True)
            self._end_backward()
            self._last = None

    def _end_backward(self) -> None:
        # What FSDP2 does at the end of a backward pass, which deferred gradients and other stages' passes come
        # after: torch's own pipeline stages call it too.
        fully_shard.state(self._units[0])._root_post_backward_final_callback()  # type: ignore[attr-defined]

    def after_backward(self) -> None:
        """Add the gradients of a backward pass to their sum in fp32, where FSDP2 does not."""
        for parameter in self._parameters:
            parameter.collect_gradient()
        if self._shared is not None:
            self._shared.reduce()
