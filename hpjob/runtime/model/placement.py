"""Put our cut layers in the place of a decoder layer's linear layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hpjob.recipe.model import ModelShape
from hpjob.runtime.model.families import Family, Placement
from hpjob.runtime.parallel.linear import ColumnParallelLinear, GatheredLinear, RowParallelLinear, SharedHeadLinear
from hpjob.runtime.parallel.tensor_region import TensorRegion
from hpjob.runtime.sequence.split_gather import SequenceLinearSettings, gather_linear


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
        block = layer.get_submodule(name)
        if region.is_ring:
            _enter_ring(block, region)
        else:
            _enter_parallel_region(block, region)


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
    """Sum the gradient of a block's input once, however many cut layers read that input."""

    _change_input(block, region.enter)


def _enter_ring(block: nn.Module, region: TensorRegion) -> None:
    """Multiply with the weights of all of a block's cut layers while the parts of its input go round."""
    columns = [module for module in block.modules() if isinstance(module, GatheredLinear)]

    def enter(shard: Tensor) -> Tensor:
        queue = columns[0].queue
        defer = None if queue is None else queue.defer_for([target for c in columns for target in c.targets])
        settings = SequenceLinearSettings(group=region.group, is_ring=True, defer_weight_gradients=defer)
        weights = [column.used_weight() for column in columns]
        for column, product in zip(columns, gather_linear(shard, weights, settings), strict=True):
            column.ready = product
        batch, length, width = shard.shape
        # The block reads no more than the shape of its input; its layers have their products.
        return shard.new_empty(()).expand(batch, length * region.size, width)

    _change_input(block, enter)


def _change_input(block: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    block.register_forward_pre_hook(hook, with_kwargs=True)
