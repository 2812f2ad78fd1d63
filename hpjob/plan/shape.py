"""What the planner needs to know of a model: the sizes that decide memory and time."""

from __future__ import annotations

from dataclasses import dataclass

from hpjob.recipe.model import ModelShape


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder-only transformer. Norm weights are left out: they are below 0.1 %."""

    num_layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True
    """Three MLP matrices (SwiGLU) instead of two."""
    tied: bool = False
    """Embedding and output head share their weights."""
    num_experts: int = 0
    experts_per_token: int = 0
    learned_positions: int = 0
    """Rows of a learned position embedding; 0 = rotary or ALiBi."""

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def attention_params(self) -> int:
        return 2 * self.hidden * (self.q_width + self.kv_width)

    @property
    def mlp_params(self) -> int:
        """Parameters of one MLP, or of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def layer_params(self) -> int:
        if not self.num_experts:
            return self.attention_params + self.mlp_params
        return self.attention_params + self.num_experts * (self.mlp_params + self.hidden)

    @property
    def active_layer_params(self) -> int:
        """Parameters that one token passes through."""
        if not self.num_experts:
            return self.layer_params
        return self.attention_params + self.experts_per_token * self.mlp_params + self.num_experts * self.hidden

    @property
    def embedding_params(self) -> int:
        return (self.vocab + self.learned_positions) * self.hidden

    @property
    def head_params(self) -> int:
        return self.vocab * self.hidden


def shape_of(model: ModelShape) -> Shape:
    """Return the sizes of a recipe's model."""
    experts = model.num_experts or 0
    width = (model.moe_intermediate_size or model.intermediate_size) if experts else model.intermediate_size
    return Shape(
        num_layers=model.num_hidden_layers,
        hidden=model.hidden_size,
        ffn=width,
        heads=model.num_attention_heads,
        kv_heads=model.num_key_value_heads,
        head_dim=model.attention_head_dim,
        vocab=model.vocab_size,
        tied=model.tie_word_embeddings,
        num_experts=experts,
        experts_per_token=model.num_experts_per_tok or 0,
    )
