"""Model families: which transformers classes they use and how their parameters are placed.

A further decoder family is one entry here. Names are those of the modules inside a decoder layer.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import nn

from hpjob.core.errors import UserInputError
from hpjob.core.schema import nearest
from hpjob.recipe.model import ModelShape


class Placement(StrEnum):
    """How tensor parallelism cuts the linear layer of that name; unnamed modules are replicated."""

    COLUMN = "column"
    KEY_VALUE = "key_value"
    """Column by key-value head; shared between ranks when there are more ranks than heads."""
    ROW = "row"


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One decoder family.

    Attributes:
        model_type: As in a transformers ``config.json``.
        class_prefix: Of its classes, such as ``Llama`` in ``LlamaDecoderLayer``.
        placements: Linear layers of a decoder layer that are cut.
        parallel_blocks: Modules of a decoder layer whose input enters the tensor-parallel region.
    """

    model_type: str
    class_prefix: str
    placements: Mapping[str, Placement]
    parallel_blocks: tuple[str, ...] = ("self_attn", "mlp")

    def config(self, shape: ModelShape) -> Any:
        """Return the transformers config of this shape."""
        module = importlib.import_module(f"transformers.models.{self.model_type}.configuration_{self.model_type}")
        return getattr(module, f"{self.class_prefix}Config")(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_hidden_layers,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=shape.attention_head_dim,
            max_position_embeddings=shape.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            rms_norm_eps=shape.rms_norm_eps,
            tie_word_embeddings=shape.tie_word_embeddings,
            use_cache=False,
        )

    def layer(self, config: Any, index: int) -> nn.Module:
        """Return one decoder layer on the current default device."""
        return self._make("DecoderLayer", config, index)

    def norm(self, config: Any) -> nn.Module:
        """Return the norm before the head."""
        return self._make("RMSNorm", config.hidden_size, eps=config.rms_norm_eps)

    def rotary(self, config: Any) -> nn.Module:
        """Return the rotary embedding; it has buffers and no parameters."""
        return self._make("RotaryEmbedding", config)

    def _make(self, suffix: str, *args: Any, **kwargs: Any) -> nn.Module:
        module = importlib.import_module(f"transformers.models.{self.model_type}.modeling_{self.model_type}")
        made: nn.Module = getattr(module, self.class_prefix + suffix)(*args, **kwargs)
        return made


_GATED_DECODER = {
    "self_attn.q_proj": Placement.COLUMN,
    "self_attn.k_proj": Placement.KEY_VALUE,
    "self_attn.v_proj": Placement.KEY_VALUE,
    "self_attn.o_proj": Placement.ROW,
    "mlp.gate_proj": Placement.COLUMN,
    "mlp.up_proj": Placement.COLUMN,
    "mlp.down_proj": Placement.ROW,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(model_type="llama", class_prefix="Llama", placements=_GATED_DECODER),
}


def family_of(model_type: str) -> Family:
    """Return the family of a ``model_type``.

    Raises:
        UserInputError: The runtime has no entry for it.
    """
    if model_type not in FAMILIES:
        guess = nearest(model_type, FAMILIES)
        raise UserInputError(
            f"the runtime has no model family {model_type!r}",
            hint=f"did you mean {guess!r}?" if guess else f"known are {', '.join(sorted(FAMILIES))}",
        )
    return FAMILIES[model_type]
