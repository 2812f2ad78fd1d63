"""Model families: which transformers classes they use and how their parameters are placed.

A further decoder family is one entry here. Names are those of the modules inside a decoder layer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
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
class ExpertNames:
    """What files of one tensor an expert call a layer's block of experts, and the parts of each expert."""

    block: str
    gate: str
    up: str
    down: str


def no_further_values(_: ModelShape) -> Mapping[str, object]:
    """Most families have no config values beyond the common ones."""
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One decoder family.

    Attributes:
        model_type: As in a transformers ``config.json``.
        class_prefix: Of its classes, such as ``Llama`` in ``LlamaDecoderLayer``.
        placements: Linear layers of a decoder layer that are cut.
        parallel_blocks: Modules of a decoder layer whose input enters the tensor-parallel region.
        head_norms: Norms of single attention heads: they act on the heads of this rank, so their gradients are
            this rank's share.
        expert_block: Module with a router and experts, which every tensor-parallel rank computes on whole sequences.
        expert_names: Of files with one tensor an expert, as they are published; needed with ``expert_block``.
        scales_embedding: Token embeddings are multiplied by the root of the hidden size.
        norm_start: Initial gain of norms; 0 where the module adds one to it.
        config_values: Further arguments of the config, from the shape.
    """

    model_type: str
    class_prefix: str
    placements: Mapping[str, Placement]
    parallel_blocks: tuple[str, ...] = ("self_attn", "mlp")
    head_norms: tuple[str, ...] = ()
    expert_block: str | None = None
    expert_names: ExpertNames | None = None
    scales_embedding: bool = False
    norm_start: float = 1.0
    config_values: Callable[[ModelShape], Mapping[str, object]] = no_further_values

    def config(self, shape: ModelShape) -> Any:
        """Return the transformers config of this shape."""
        module = importlib.import_module(f"transformers.models.{self.model_type}.configuration_{self.model_type}")
        values: dict[str, Any] = {
            "vocab_size": shape.vocab_size,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.num_hidden_layers,
            "num_attention_heads": shape.num_attention_heads,
            "num_key_value_heads": shape.num_key_value_heads,
            "head_dim": shape.attention_head_dim,
            "max_position_embeddings": shape.max_position_embeddings,
            "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
            "rms_norm_eps": shape.rms_norm_eps,
            "tie_word_embeddings": shape.tie_word_embeddings,
            "use_cache": False,
        }
        values |= {**self.config_values(shape), **(shape.config_values or {})}
        # The recipe's base also holds where the way it is scaled comes from a file.
        values["rope_parameters"] = {**values["rope_parameters"], "rope_theta": shape.rope_theta}
        return getattr(module, f"{self.class_prefix}Config")(**values)

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


_ATTENTION = {
    "self_attn.q_proj": Placement.COLUMN,
    "self_attn.k_proj": Placement.KEY_VALUE,
    "self_attn.v_proj": Placement.KEY_VALUE,
    "self_attn.o_proj": Placement.ROW,
}
_GATED_DECODER = {
    **_ATTENTION,
    "mlp.gate_proj": Placement.COLUMN,
    "mlp.up_proj": Placement.COLUMN,
    "mlp.down_proj": Placement.ROW,
}

_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


def _mixtral_values(shape: ModelShape) -> Mapping[str, object]:
    # Mixtral has no width of its own for experts.
    width = shape.moe_intermediate_size or shape.intermediate_size
    return {
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "intermediate_size": width,
    }


def _qwen3_moe_values(shape: ModelShape) -> Mapping[str, object]:
    return {
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "moe_intermediate_size": shape.moe_intermediate_size or shape.intermediate_size,
        "norm_topk_prob": True,
    }


_ENTRIES = (
    Family(model_type="llama", class_prefix="Llama", placements=_GATED_DECODER),
    Family(model_type="mistral", class_prefix="Mistral", placements=_GATED_DECODER),
    Family(model_type="qwen2", class_prefix="Qwen2", placements=_GATED_DECODER),
    Family(model_type="qwen3", class_prefix="Qwen3", placements=_GATED_DECODER, head_norms=_HEAD_NORMS),
    Family(model_type="smollm3", class_prefix="SmolLM3", placements=_GATED_DECODER),
    Family(model_type="gemma", class_prefix="Gemma", placements=_GATED_DECODER, scales_embedding=True, norm_start=0.0),
    Family(
        model_type="mixtral",
        class_prefix="Mixtral",
        placements=_ATTENTION,
        parallel_blocks=("self_attn",),
        expert_block="mlp",
        expert_names=ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
        config_values=_mixtral_values,
    ),
    Family(
        model_type="qwen3_moe",
        class_prefix="Qwen3Moe",
        placements=_ATTENTION,
        parallel_blocks=("self_attn",),
        head_norms=_HEAD_NORMS,
        expert_block="mlp",
        expert_names=ExpertNames(block="mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        config_values=_qwen3_moe_values,
    ),
)
FAMILIES: dict[str, Family] = {entry.model_type: entry for entry in _ENTRIES}


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
