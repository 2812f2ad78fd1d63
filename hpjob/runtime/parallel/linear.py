"""Linear layers cut over the tensor-parallel group.

A weight is a DTensor on the tensor-parallel mesh, which tells checkpoints, and with ``cpu_offload`` FSDP2, how it is
cut; the arithmetic runs on its local tensor. The sum of input gradients belongs to the entry of the whole block
(:meth:`hpjob.runtime.parallel.tensor_region.TensorRegion.enter`), so that q, k and v share one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hpjob.runtime.parallel.fp8 import Fp8Product
from hpjob.runtime.parallel.region import chunk_bounds
from hpjob.runtime.parallel.tensor_region import TensorRegion
from hpjob.runtime.sequence.compiled_gather import compiled_gather_linear
from hpjob.runtime.sequence.compiled_scatter import compiled_linear_scatter
from hpjob.runtime.sequence.split_gather import BlockInput, gather_linear, linear_reduce_scatter
from hpjob.runtime.weight_gradients import GradientTarget, PutOffProducts, WeightGradientQueue
from hpjob.runtime.weight_sums import ProductReceiver, handing_linear, number_of


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


class DeferringLinear(nn.Module, ABC):
    """A linear layer whose weight gradients a pipeline schedule may compute later.

    Attributes:
        queue: Set where they are put off; None = they are not.
        fp8: Multiplies in 8 bits; None = in the dtype of the inputs.
        receiver: Takes the weight's gradient in place of autograd.
        number: What compiled code finds the receiver by.
    """

    queue: WeightGradientQueue | None = None
    fp8: Fp8Product | None = None
    receiver: ProductReceiver | None = None
    number: Tensor | None = None
    weight: nn.Parameter
    bias: nn.Parameter | None

    @property
    def targets(self) -> list[GradientTarget]:
        """Where the gradients of :meth:`used_weight` go."""
        return [GradientTarget(self.weight)]

    @abstractmethod
    def used_weight(self) -> Tensor:
        """What this rank multiplies with, (outputs, inputs)."""

    def product(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x W^T + b``."""
        weight = self.used_weight()
        if self.fp8 is not None:
            product = self.fp8(inputs, weight)
            return product if bias is None else product + bias
        # Asked of the parameter: a compiler need not know of the local part of a DTensor that it wants a gradient.
        if self.number is not None and inputs.requires_grad and self.weight.requires_grad:
            return handing_linear(inputs, weight, self.number, bias)
        return F.linear(inputs, weight, bias)

    def sum_gradients(self, total: ProductReceiver) -> None:
        """Add gradients of the weight to a sum from now on; those of a part of its rows go the usual way."""
        if self.targets[0].rows is None and self.used_weight().numel() > 0:
            self._hand_to(total)

    def put_off_gradients(self, queue: WeightGradientQueue) -> None:
        """Leave gradients of the weight to a queue from now on; it adds them to the sum, if there is one."""
        self.queue, total = queue, self.receiver
        self._hand_to(PutOffProducts(queue, lambda: total or self.targets[0]))

    def _hand_to(self, receiver: ProductReceiver) -> None:
        self.receiver, self.number = receiver, number_of(receiver)


class GatheredLinear(DeferringLinear):
    """A linear layer behind a gather of its input, which may have been multiplied while it was gathered.

    Attributes:
        ready: The product, where that was so; taken once.
    """

    ready: Tensor | None = None

    @abstractmethod
    def used_bias(self) -> Tensor | None:
        """The bias of the outputs that this rank makes."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (..., in_features) to (..., this rank's outputs)."""
        bias = self.used_bias()
        if self.ready is None:
            return self.product(inputs, bias)
        product, self.ready = self.ready, None
        return product if bias is None else product + bias


def multiply_gathered(
    shard: Tensor, columns: Sequence[GatheredLinear], region: TensorRegion, block: BlockInput | None = None
) -> None:
    """Multiply a split sequence with the weights of some layers while it is gathered; they find their products.

    Args:
        shard: (1, this rank's tokens, features).
        columns: Layers that read the same input.
        region: Whose sequence is split.
        block: The block that begins with these layers, if its last one gathers their input for the backward pass.
    """
    weights = [column.used_weight() for column in columns]
    if torch.compiler.is_compiling():
        numbers = [column.number if column.weight.requires_grad else None for column in columns]
        products = compiled_gather_linear(shard, weights, numbers, region.exchange)
    else:
        queue = columns[0].queue
        defer = None if queue is None else queue.defer_for([target for c in columns for target in c.targets])
        products = gather_linear(shard, weights, region.linear_settings(defer, block))
    for column, product in zip(columns, products, strict=True):
        column.ready = region.as_sequences(product)


class ColumnParallelLinear(GatheredLinear):
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

    def used_weight(self) -> Tensor:
        return local_tensor(self.weight)

    def used_bias(self) -> Tensor | None:
        return None if self.bias is None else local_tensor(self.bias)


class RowParallelLinear(DeferringLinear):
    """``y = x W^T + b`` with the columns of W (input features) cut like x; y leaves the region summed.

    Attributes:
        block: Of a split sequence: what entered the block that ends here, and who wants it back; taken once.
    """

    block: tuple[BlockInput, Tensor] | None = None

    def __init__(self, in_features: int, out_features: int, *, bias: bool, region: TensorRegion) -> None:
        super().__init__()
        self.region = region
        self.weight = cut_parameter((out_features, in_features), 1, region.mesh)
        self.bias = nn.Parameter(torch.empty(out_features, device="meta")) if bias else None

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, seq, this rank's chunk of in_features) to out_features, as activations are outside the region."""
        if self.region.multiplies_while_splitting:
            (block, shard), self.block = self.block or (None, None), None
            settings = self.region.linear_settings(
                None if self.queue is None else self.queue.defer_for(self.targets), block
            )
            outputs = linear_reduce_scatter(self.region.as_row(inputs), self.used_weight(), settings, shard)
        elif self.region.multiplies_while_gathering:
            number = self.number if self.weight.requires_grad else None
            row = self.region.as_row(inputs)
            outputs = compiled_linear_scatter(row, self.used_weight(), number, self.region.exchange)
        else:
            outputs = self.region.leave(self.product(inputs))
        return outputs if self.bias is None else outputs + self.bias

    def used_weight(self) -> Tensor:
        return local_tensor(self.weight)


class SharedHeadLinear(GatheredLinear):
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

    @property
    def targets(self) -> list[GradientTarget]:
        return [GradientTarget(self.weight, self.rows)]

    def used_weight(self) -> Tensor:
        return self.weight[self.rows]

    def used_bias(self) -> Tensor | None:
        return None if self.bias is None else self.bias[self.rows]
