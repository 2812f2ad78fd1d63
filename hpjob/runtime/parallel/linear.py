"""Linear layers cut over the tensor-parallel group.

A weight is a DTensor on the tensor-parallel mesh, which tells FSDP2 and checkpoints how it is cut;
the arithmetic runs on its local tensor. The sum of input gradients belongs to the entry of the
whole block (:meth:`hpjob.runtime.parallel.tensor_region.TensorRegion.enter`), so that q, k and v share one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hpjob.runtime.parallel.region import chunk_bounds
from hpjob.runtime.parallel.tensor_region import TensorRegion


def local_tensor(parameter: Tensor) -> Tensor:
    """Return what this rank computes with: the local tensor of a DTensor, else the tensor itself."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def cut_parameter(shape: tuple[int, ...], dim: int, tp_mesh: DeviceMesh) -> nn.Parameter:
    """Return a parameter on the meta device, cut along ``dim`` over the tensor-parallel mesh.

    Args:
        shape: Global shape; ``dim`` need not divide by the size of the mesh.
        dim: Dim that is cut.
        tp_mesh: One axis; of size 1, the parameter is a plain tensor.
    """
    if tp_mesh.size() == 1:
        return nn.Parameter(torch.empty(shape, device="meta"))
    begin, end = chunk_bounds(shape[dim], tp_mesh.size(), tp_mesh.get_local_rank())
    sizes = [*shape[:dim], end - begin, *shape[dim + 1 :]]
    whole = torch.empty(shape, device="meta")
    local = torch.empty(sizes, device="meta")
    described = DTensor.from_local(
        local, tp_mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return nn.Parameter(described)


class ColumnParallelLinear(nn.Module):
    """``y = x W^T + b`` with the rows of W (output features) cut; y stays cut.

    Args:
        in_features: Whole input width.
        out_features: Whole output width; this rank makes its chunk of it.
        bias: Whether there is one, cut like the output.
        tp_mesh: The tensor-parallel axis.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, tp_mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = cut_parameter((out_features, in_features), 0, tp_mesh)
        self.bias = cut_parameter((out_features,), 0, tp_mesh) if bias else None

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (..., in_features) to (..., this rank's chunk of out_features)."""
        bias = None if self.bias is None else local_tensor(self.bias)
        return F.linear(inputs, local_tensor(self.weight), bias)


class RowParallelLinear(nn.Module):
    """``y = x W^T + b`` with the columns of W (input features) cut like x; y leaves the region summed."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, region: TensorRegion) -> None:
        super().__init__()
        self.region = region
        self.weight = cut_parameter((out_features, in_features), 1, region.mesh)
        self.bias = nn.Parameter(torch.empty(out_features, device="meta")) if bias else None

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (..., this rank's chunk of in_features) to (..., out_features)."""
        outputs = self.region.leave(F.linear(inputs, local_tensor(self.weight)))
        return outputs if self.bias is None else outputs + self.bias


class SharedHeadLinear(nn.Module):
    """A key or value projection with fewer heads than tensor-parallel ranks.

    Every rank stores all of W and computes the one head that its query heads read. Its gradient is
    this rank's share only: :func:`hpjob.runtime.optimizer.gradients.sum_gradients` adds them up.

    Args:
        in_features: Whole input width.
        num_heads: Key-value heads; the group's size is a multiple of it.
        head_dim: Width of a head.
        bias: Whether there is one.
        tp_mesh: The tensor-parallel axis.
    """

    def __init__(self, in_features: int, num_heads: int, head_dim: int, *, bias: bool, tp_mesh: DeviceMesh) -> None:
        super().__init__()
        head = tp_mesh.get_local_rank() * num_heads // tp_mesh.size()
        self.rows = slice(head * head_dim, (head + 1) * head_dim)
        self.weight = nn.Parameter(torch.empty(num_heads * head_dim, in_features, device="meta"))
        self.bias = nn.Parameter(torch.empty(num_heads * head_dim, device="meta")) if bias else None

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (..., in_features) to (..., head_dim)."""
        bias = None if self.bias is None else self.bias[self.rows]
        return F.linear(inputs, self.weight[self.rows], bias)
