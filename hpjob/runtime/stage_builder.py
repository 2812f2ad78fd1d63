"""Builds the stages of a rank.

The order: cut into stages, cut over tp, recomputation, FSDP2 where the host keeps shards, memory and weights, then what
linear layers do with their gradients, and compiling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpjob.plan.model import Axis, Plan
from hpjob.recipe.model import Recipe
from hpjob.runtime.mesh import Mesh
from hpjob.runtime.model.attention import attention_kernel
from hpjob.runtime.model.compiled import compile_stage, compiles_layers
from hpjob.runtime.model.cuts import plan_cuts
from hpjob.runtime.model.experts import place_experts
from hpjob.runtime.model.families import family_of
from hpjob.runtime.model.parameters import Fill, ShardedParameter, materialise
from hpjob.runtime.model.stage import DecoderStage, stage_parts
from hpjob.runtime.parallel.data import COMPUTE_DTYPE, GradientSync, needs_fsdp, shard_stage, shares_weights
from hpjob.runtime.parallel.fp8 import Fp8Product
from hpjob.runtime.parallel.shared_weights import SharedWeights
from hpjob.runtime.parallel.tensor_region import TensorRegion
from hpjob.runtime.parallel.weight_unit import Sharing
from hpjob.runtime.sequence.exchange import sequence_exchange
from hpjob.runtime.weight_gradients import WeightGradientQueue


@dataclass(frozen=True, slots=True)
class BuiltStage:
    """A stage with what trains it.

    Attributes:
        module: The stage.
        parameters: All of its parameters.
        sync: When its gradients are synchronised.
        queue: Where weight gradients wait, if they are actions of their own.
    """

    module: DecoderStage
    parameters: list[ShardedParameter]
    sync: GradientSync
    queue: WeightGradientQueue | None


class StageBuilder:
    """Builds stages of one run.

    Args:
        plan: The layout.
        recipe: Model and seed.
        mesh: With axes for experts, where there are some.
        device: Of this rank.
        defers_weights: Weight gradients are computed after the backward passes.
        fill: Makes the weights' values.

    Attributes:
        region: Edges of the tensor-parallel region.
    """

    def __init__(
        self, plan: Plan, recipe: Recipe, mesh: Mesh, device: torch.device, defers_weights: bool, fill: Fill
    ) -> None:
        self._plan, self._recipe, self._mesh, self._device = plan, recipe, mesh, device
        self._defers, self._fill = defers_weights, fill
        self._kernel = attention_kernel(plan, mesh, device)
        self.region = _tensor_region(plan, recipe, mesh, device)

    def build(self, number: int) -> BuiltStage:
        """Return a stage with memory and its initial weights; a collective call of the ranks that have it."""
        plan, recipe, mesh = self._plan, self._recipe, self._mesh
        part = stage_parts(plan.pipeline.layers_per_stage)[number]
        family = family_of(recipe.model.model_type)
        stage = DecoderStage(family, recipe.model, part, plan, self.region, self._kernel)
        place_experts(stage.model.layers, family, mesh, self.region)  # type: ignore[arg-type]
        cuts = plan_cuts(stage, mesh)
        shard_stage(stage, plan, mesh, {name: cut.shard_dim for name, cut in cuts.items()})
        sharing = self._sharing()
        own = materialise(
            *(stage, cuts, mesh, torch.device("cpu") if plan.cpu_offload else self._device),
            seed=recipe.training.seed,
            compute_dtype=torch.float32 if needs_fsdp(plan) else COMPUTE_DTYPE[plan.precision],
            sharing=sharing,
            fill=self._fill,
        )
        queue = WeightGradientQueue() if self._defers else None
        shared = None if sharing is None else SharedWeights(stage, own, sharing, queue)
        stage.make_rotary(self._device)
        self._hand_gradients(stage, own, sharing, queue)
        if compiles_layers(plan, recipe, self._device):
            compile_stage(stage, keeps_products=queue is not None)
        parameters = own if shared is None else shared.in_order
        return BuiltStage(stage, parameters, GradientSync(stage, plan, own, shared), queue)

    def _sharing(self) -> Sharing | None:
        plan = self._plan
        if not shares_weights(plan, self._mesh):
            return None
        return Sharing(zero_stage=plan.zero_stage, num_microbatches=plan.pipeline.num_microbatches, defers=self._defers)

    def _hand_gradients(
        self,
        stage: DecoderStage,
        own: list[ShardedParameter],
        sharing: Sharing | None,
        queue: WeightGradientQueue | None,
    ) -> None:
        """Tell linear layers and the embedding where their weights' gradients go."""
        if self._recipe.parallel.use_fp8:
            stage.multiply_in_fp8(Fp8Product(self._device))
        several = self._plan.pipeline.num_microbatches > 1
        if several or sharing is not None:
            sums = {item.parameter: item.master for item in own if item.master is not None}
            reduces_every = sharing is not None and sharing.reduces_every
            stage.sum_weight_gradients(sums, over_microbatches=several and not reduces_every)
        if queue is not None:
            stage.defer_weight_gradients(queue)


def _tensor_region(plan: Plan, recipe: Recipe, mesh: Mesh, device: torch.device) -> TensorRegion:
    mode = plan.sequence_parallelism_mode
    splits = mode == "split_gather" and mesh.size(Axis.TP) > 1 and compiles_layers(plan, recipe, device)
    return TensorRegion(
        mesh=mesh.tp_mesh,
        splits_sequence=mode in ("split_gather", "ring"),
        batch=plan.pipeline.microbatch_size,
        is_ring=mode == "ring",
        gathers_first=recipe.parallel.use_fp8,
        edges=sequence_exchange(mesh.group(Axis.TP), device) if splits else None,
    )
