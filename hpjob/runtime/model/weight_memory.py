"""Where the weights of a stage lie that several ranks compute with, and which chunk of each is this rank's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpjob.runtime.mesh import Mesh
from hpjob.runtime.model.cuts import Cut
from hpjob.runtime.model.stage import DecoderStage
from hpjob.runtime.parallel.linear import local_tensor
from hpjob.runtime.parallel.own_chunk import OwnChunk, sharing_ranks
from hpjob.runtime.parallel.peer_arena import PeerArena, bytes_for
from hpjob.runtime.parallel.peer_memory import all_agree, allocator, reaches_peers
from hpjob.runtime.parallel.weight_unit import Sharing, resize

_SUM = torch.float32


@dataclass(frozen=True, slots=True)
class Place:
    """Of one weight: this rank's chunk, and the memory of its gradients' sum where that matters."""

    chunk: OwnChunk
    sum_home: Tensor | None = None


def allocate(stage: DecoderStage, device: torch.device, sharing: Sharing | None) -> None:
    """Give a stage on the meta device memory without values; never all of it at once where weights are freed."""
    for module in stage.modules():
        module.to_empty(device=device, recurse=False)
        if sharing is not None and sharing.frees:
            for parameter in module.parameters(recurse=False):
                resize(local_tensor(parameter.detach()), is_whole=False)


def share_weights(
    stage: DecoderStage, cuts: Mapping[str, Cut], mesh: Mesh, device: torch.device, sharing: Sharing
) -> dict[str, Place]:
    """Return where all weights of a stage have their place; a collective call.

    What ranks exchange moves to memory that they read directly, where they can.

    Args:
        stage: After :func:`allocate`.
        cuts: Of all its parameters.
        mesh: The mesh of the run.
        device: Where the weights are.
        sharing: ZeRO stage.
    """
    result: dict[str, Place] = {}
    for is_expert, ranks in sharing_ranks(mesh).items():
        weights = {name: p for name, p in stage.named_parameters() if cuts[name].is_expert is is_expert}
        chunks = {
            name: OwnChunk.of_shape(local_tensor(parameter).shape, cuts[name].shard_dim, ranks)
            for name, parameter in weights.items()
        }
        even = {name: parameter for name, parameter in weights.items() if chunks[name].is_even}
        places = _places_in_arena(stage, even, chunks, device, sharing)
        for name, parameter in weights.items():
            kept = _keeping(chunks[name], parameter) if sharing.frees else chunks[name]
            result[name] = places.get(name, Place(kept))
    return result


def _keeping(chunk: OwnChunk, parameter: nn.Parameter) -> OwnChunk:
    shape = list(local_tensor(parameter).shape)
    shape[chunk.dim] = chunk.length
    return replace(chunk, kept=torch.empty(shape, dtype=parameter.dtype, device=parameter.device))


def _places_in_arena(
    stage: DecoderStage,
    even: Mapping[str, nn.Parameter],
    chunks: Mapping[str, OwnChunk],
    device: torch.device,
    sharing: Sharing,
) -> dict[str, Place]:
    """Place weights, or with ZeRO 3 this rank's chunks, and the sums of gradients in memory that the ranks share.

    Args:
        stage: Of the weights.
        even: Weights that are divided evenly, among one set of ranks.
        chunks: Of all weights.
        device: Where they are.
        sharing: ZeRO stage.
    """
    if not even:
        return {}
    ranks = next(iter(chunks.values())).ranks
    if ranks.shard.size() == 1:
        return {}
    reaches = reaches_peers(ranks.shard, device)
    if device.type == "cuda" and ranks.replicate.size() > 1:
        # Ranks that sum the same chunks must sum them in the same calls.
        reaches = all_agree(reaches, ranks.replicate, device)
    if not reaches:
        return {}
    parts = ranks.shard.size() if sharing.frees else 1
    shapes = {name: (len(local_tensor(p)) // parts, *local_tensor(p).shape[1:]) for name, p in even.items()}
    sums = _sum_names(stage, even, sharing)
    of_sums = {sums[name]: local_tensor(even[name]).shape for name in sums}
    size = bytes_for([(shapes[name], p.dtype) for name, p in even.items()])
    size += bytes_for([(shape, _SUM) for shape in of_sums.values()])
    arena = PeerArena(ranks.shard, size, allocator(ranks.shard, device), device)
    homes = {key: arena.place(shape, _SUM) for key, shape in of_sums.items()}
    shared = replace(ranks, arena=arena)
    result = {}
    for name, parameter in even.items():
        memory = arena.place(shapes[name], parameter.dtype)
        chunk = replace(chunks[name], ranks=shared)
        if sharing.frees:
            chunk = replace(chunk, kept=memory)
        else:
            _move(parameter, memory)
        result[name] = Place(chunk, homes[sums[name]] if name in sums else None)
    return result


def _sum_names(stage: DecoderStage, even: Mapping[str, nn.Parameter], sharing: Sharing) -> dict[str, str]:
    """Return of weights what the memory of their sum is called; those with one name take turns.

    Where whole sums last only from a layer's backward pass to their reduction, every second layer has the same memory:
    a layer's sums are reduced before the one after the next makes its own. Both ends of the model have theirs in
    common. Deferred gradients of several microbatches lie about at once, so theirs take no turns.
    """
    if not sharing.reduces_every:
        return {name: name for name in even}
    if sharing.defers:
        return {}
    names = {id(parameter): name for name, parameter in even.items()}
    turns = {
        names[id(parameter)]: f"{number % 2} {inside} {tuple(local_tensor(parameter).shape)}"
        for number, layer in enumerate(stage.decoder_layers)
        for inside, parameter in layer.named_parameters()
        if id(parameter) in names
    }
    ends = {name: f"end {tuple(local_tensor(p).shape)}" for name, p in even.items() if name not in turns}
    return ends | turns


def _move(parameter: nn.Parameter, memory: Tensor) -> None:
    if isinstance(parameter, DTensor):
        parameter._local_tensor = memory
    else:
        parameter.data = memory
