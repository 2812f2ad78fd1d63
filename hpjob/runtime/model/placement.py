"""Put our cut layers in the place of a decoder layer's linear layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hpjob.recipe.model import ModelShape
from hpjob.runtime.model.families import Family, Placement
from hpjob.runtime.parallel.linear import (
    ColumnParallelLinear,
    GatheredLinear,
    RowParallelLinear,
    SharedHeadLinear,
    multiply_gathered,
)
from hpjob.runtime.parallel.tensor_region import TensorRegion
from hpjob.runtime.sequence.split_gather import BlockInput


def place_layer(layer: nn.Module, family: Family, shape: ModelShape, region: TensorRegion) -> None:
    """Cut a decoder layer on the meta device over the tensor-parallel mesh, in place."""
    for name, placement in family.placements.items():
        linear = layer.get_submodule(name)
        if isinstance(linear, nn.Linear):
            parent, _, child = name.rpartition(".")
            setattr(layer.get_submodule(parent), child, _cut(linear, placement, shape, region))
    if region.size == 1:
        return
    attention = layer.get_submodule("self_attn")
    query_heads = shape.num_attention_heads // region.size
    key_value_heads = max(1, shape.num_key_value_heads // region.size)
    attention.num_key_value_groups = query_heads // key_value_heads  # type: ignore[assignment]
    for name in family.parallel_blocks:
        _enter_parallel_region(layer.get_submodule(name), region)


def _cut(linear: nn.Linear, placement: Placement, shape: ModelShape, region: TensorRegion) -> nn.Module:
    tp_mesh = region.mesh
    has_bias = linear.bias is not None
    if placement is Placement.ROW:
        return RowParallelLinear(linear.in_features, linear.out_features, bias=has_bias, region=region)
    if placement is Placement.KEY_VALUE and shape.num_key_value_heads < region.size:
        return SharedHeadLinear(
            linear.in_features, shape.num_key_value_heads, shape.attention_head_dim, bias=has_bias, tp_mesh=tp_mesh
        )
    return ColumnParallelLinear(linear.in_features, linear.out_features, bias=has_bias, tp_mesh=tp_mesh)


def _enter_parallel_region(block: nn.Module, region: TensorRegion) -> None:
    """Let a block's input enter the region once, however many cut layers read it.

    Of a split sequence the cut layers' products are made here, from parts of it as they come.
    """
    columns = [module for module in block.modules() if isinstance(module, GatheredLinear)]
    rows = [module for module in block.modules() if isinstance(module, RowParallelLinear)]

    def enter(hidden: Tensor) -> Tensor:
        if not region.multiplies_while_gathering:
            return region.enter(hidden)
        one_gathers_for_both = region.multiplies_while_splitting and columns[0].queue is None and len(rows) == 1
        block_input = BlockInput() if one_gathers_for_both else None
        multiply_gathered(hidden, columns, region, block_input)
        if block_input is not None:
            rows[0].block = (block_input, hidden.detach())
        _, tokens, width = hidden.shape
        # The block reads no more than the shape of its input; its layers have their products.
        return hidden.new_empty(()).expand(region.batch, tokens * region.size // region.batch, width)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (enter(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": enter(kwargs["hidden_states"])}

    block.register_forward_pre_hook(hook, with_kwargs=True)
