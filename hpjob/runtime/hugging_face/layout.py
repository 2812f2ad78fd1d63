"""How a model's parameters stand in files: mostly one to one, experts one by one or stacked.

Published files of models with experts hold one matrix an expert and projection
(``mlp.experts.3.gate_proj.weight``, Mixtral: ``block_sparse_moe.experts.3.w1.weight``). In memory the experts of a
layer are two parameters, of shape (experts, 2, intermediate, hidden) and (experts, hidden, intermediate).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hpjob.recipe.model import ModelShape
from hpjob.runtime.model.families import ExpertNames, Family
from hpjob.runtime.model.stage import EMBEDDING, HEAD
from hpjob.runtime.parallel.region import Region

_GATE_UP = ".experts.gate_up_proj"
_DOWN = ".experts.down_proj"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a parameter, and where it stands in a file.

    Attributes:
        source: Name of the tensor in the file.
        shape: Of that tensor.
        begin: Where the part begins in that tensor, per dim of it.
        index: Per dim of the parameter: a coordinate, or None for a whole dim, which is the tensor's next one.
    """

    source: str
    shape: tuple[int, ...]
    begin: tuple[int, ...]
    index: tuple[int | None, ...]

    def overlap(self, region: Region) -> tuple[tuple[slice, ...], tuple[slice | int, ...]] | None:
        """Return what to take from the file's tensor and where it goes inside ``region``; None = nothing."""
        source: list[slice] = []
        target: list[slice | int] = []
        begins = iter(self.begin)
        for coordinate, offset, size in zip(self.index, region.offsets, region.sizes, strict=True):
            if coordinate is None:
                begin = next(begins) + offset
                source.append(slice(begin, begin + size))
                target.append(slice(None))
            elif offset <= coordinate < offset + size:
                target.append(coordinate - offset)
            else:
                return None
        return tuple(source), tuple(target)


def model_parameters(family: Family, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every parameter of a whole model, a tied head left out."""
    config = family.config(shape)
    with torch.device("meta"):
        norm = family.norm(config)
        layers = [family.layer(config, index) for index in range(shape.num_hidden_layers)]
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocab_size, shape.hidden_size)}
    for number, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            found[f"model.layers.{number}.{name}"] = _told_apart(name, tuple(parameter.shape))
    found |= {f"model.norm.{name}": tuple(parameter.shape) for name, parameter in norm.named_parameters()}
    if not shape.tie_word_embeddings:
        found[HEAD] = (shape.vocab_size, shape.hidden_size)
    return found


def _told_apart(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if not name.endswith(_GATE_UP):
        return shape
    experts, rows, hidden = shape
    return (experts, 2, rows // 2, hidden)


def is_stacked(names: Iterable[str]) -> bool:
    """Whether files hold the experts of a layer in one tensor."""
    return any(name.endswith((_GATE_UP, _DOWN)) for name in names)


def pieces_of(name: str, shape: tuple[int, ...], family: Family, *, stacked: bool = False) -> list[Piece]:
    """Return what files hold of a parameter; the pieces cover it without overlap.

    Args:
        name: Of the parameter, as :func:`model_parameters` has it.
        shape: Likewise.
        family: Says what published files call the parts of an expert.
        stacked: Files hold the experts of a layer in one tensor.
    """
    names = family.expert_names
    if names is None or family.expert_block is None:
        return [_whole(name, shape)]
    if name.endswith((_GATE_UP, _DOWN)):
        return _stacked(name, shape) if stacked else _single(name, shape, names)
    if stacked:
        return [_whole(name, shape)]
    return [_whole(name.replace(f".{family.expert_block}.", f".{names.block}."), shape)]


def _whole(name: str, shape: tuple[int, ...]) -> Piece:
    return Piece(name, shape, (0,) * len(shape), (None,) * len(shape))


def _stacked(name: str, shape: tuple[int, ...]) -> list[Piece]:
    if len(shape) == 3:
        return [_whole(name, shape)]
    experts, halves, rows, hidden = shape
    whole = (experts, halves * rows, hidden)
    return [Piece(name, whole, (0, half * rows, 0), (None, half, None, None)) for half in range(halves)]


def _single(name: str, shape: tuple[int, ...], names: ExpertNames) -> list[Piece]:
    layer = name.rsplit(".", maxsplit=3)[0]
    rows, columns = shape[-2:]
    pieces = []
    for expert in range(shape[0]):
        prefix = f"{layer}.{names.block}.experts.{expert}"
        if len(shape) == 3:
            parts: list[tuple[str, tuple[int | None, ...]]] = [(names.down, (expert, None, None))]
        else:
            parts = [(names.gate, (expert, 0, None, None)), (names.up, (expert, 1, None, None))]
        pieces += [Piece(f"{prefix}.{part}.weight", (rows, columns), (0, 0), index) for part, index in parts]
    return pieces
