"""One matrix product for projections that read the same input: q, k, v, and gate, up.

A wide product runs at a higher rate than several narrow ones, and its input gradient needs no sums. The
parameters stay separate, so names, placement and checkpoints know nothing of it. For compiled layers only:
there the joined output that passes from the block to its projections is a local value of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpjob.runtime.parallel.linear import ColumnParallelLinear, local_tensor

_GROUPS = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
_ATTRIBUTE = "hpjob_joined"


def join_projections(layer: nn.Module) -> None:
    """Join the projections of a decoder layer, in place, where all of a group are cut by columns."""
    for name, children in _GROUPS.items():
        block = getattr(layer, name, None)
        linears = [getattr(block, child, None) for child in children]
        if block is None or not all(isinstance(linear, ColumnParallelLinear) for linear in linears):
            continue
        block.register_forward_pre_hook(partial(_project, linears), with_kwargs=True)
        for index, linear in enumerate(linears):
            linear.forward = partial(_part, block, index)  # type: ignore[union-attr,method-assign]


def _project(
    linears: Sequence[ColumnParallelLinear], block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    inputs: Tensor = args[0] if args else kwargs["hidden_states"]
    weights = [local_tensor(linear.weight) for linear in linears]
    biases = [local_tensor(linear.bias) for linear in linears if linear.bias is not None]
    outputs = F.linear(inputs, torch.cat(weights), torch.cat(biases) if biases else None)
    setattr(block, _ATTRIBUTE, outputs.split([len(weight) for weight in weights], dim=-1))


def _part(block: nn.Module, index: int, _: Tensor) -> Tensor:
    parts: list[Tensor | None] = list(getattr(block, _ATTRIBUTE))
    part = parts[index]
    if part is None:
        raise RuntimeError("a joined projection was asked for twice")
    parts[index] = None
    setattr(block, _ATTRIBUTE, None if all(other is None for other in parts) else tuple(parts))
    return part
