"""Where the weights of a stage lie that several ranks hold whole, and which chunk of each is this rank's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpjob.runtime.mesh import Mesh
from hpjob.runtime.model.cuts import Cut
from hpjob.runtime.model.stage import DecoderStage
from hpjob.runtime.parallel.own_chunk import OwnChunk, sharing_ranks
from hpjob.runtime.parallel.peer_arena import PeerArena, bytes_for
from hpjob.runtime.parallel.peer_memory import allocator, reaches_peers

_SUM = torch.float32


def share_weights(
    stage: DecoderStage, cuts: Mapping[str, Cut], mesh: Mesh, device: torch.device
) -> dict[str, tuple[OwnChunk, Tensor | None]]:
    """Return each weight's chunk, and the memory of its gradients' sum where that matters; a collective call.

    Weights move to memory that the ranks read directly where they can.

    Args:
        stage: With memory, without values.
        cuts: Of all its parameters.
        mesh: The mesh of the run.
        device: Where the weights are.
    """
    result: dict[str, tuple[OwnChunk, Tensor | None]] = {}
    by_expert = sharing_ranks(mesh)
    for is_expert, ranks in by_expert.items():
        chunks = {
            name: OwnChunk.of_shape(_local(parameter).shape, cuts[name].shard_dim, ranks)
            for name, parameter in stage.named_parameters()
            if cuts[name].is_expert is is_expert
        }
        even = {name: stage.get_parameter(name) for name, chunk in chunks.items() if chunk.is_even}
        arena = _arena(list(even.values()), ranks.shard, device)
        placed = replace(ranks, arena=arena)
        for name, chunk in chunks.items():
            if arena is None or name not in even:
                result[name] = chunk, None
            else:
                result[name] = replace(chunk, ranks=placed), _move(even[name], arena)
    return result


def _arena(parameters: list[nn.Parameter], group: dist.ProcessGroup, device: torch.device) -> PeerArena | None:
    if not parameters or group.size() == 1 or not reaches_peers(group, device):
        return None
    shapes = [(_local(parameter).shape, dtype) for parameter in parameters for dtype in (parameter.dtype, _SUM)]
    return PeerArena(group, bytes_for(shapes), allocator(group, device), device)


def _move(parameter: nn.Parameter, arena: PeerArena) -> Tensor:
    """Give a parameter memory of the arena; returns that of its sum."""
    shape = _local(parameter).shape
    weight = arena.place(shape, parameter.dtype)
    if isinstance(parameter, DTensor):
        parameter._local_tensor = weight
    else:
        parameter.data = weight
    return arena.place(shape, _SUM)


def _local(parameter: nn.Parameter) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
