"""What the planner needs to know of a model: the sizes that decide memory and time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hpjob.recipe.model import ModelShape


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: queries, keys and values pass through narrow projections."""

    q_rank: int
    """0 = queries are projected directly."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder-only transformer. Norm weights are left out: they are below 0.1 %."""

    num_layers: int
    hidden: int
    ffn: int
    """MLP width, or that of one expert."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True
    """Three MLP matrices (SwiGLU) instead of two."""
    tied: bool = False
    """Embedding and output head share their weights."""
    rotary: bool = True
    rms_norm: bool = True
    num_experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    """Experts that every token passes through, as multiples of ``ffn``."""
    dense_layers: int = 0
    """First layers with a dense MLP in a model with experts."""
    dense_ffn: int = 0
    learned_positions: int = 0
    """Rows of a learned position embedding; 0 = rotary or ALiBi."""
    latent: Latent | None = None

    @cached_property
    def q_width(self) -> int:
        return self.heads * (self.latent.nope_dim + self.latent.rope_dim if self.latent else self.head_dim)

    @cached_property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def kv_shards(self, tp: int) -> int:
        """Over how many ranks of tp the key-value heads are cut; beyond their number they are repeated."""
        return min(tp, self.kv_heads)

    @cached_property
    def value_width(self) -> int:
        """Width of the attention's output."""
        return self.heads * (self.latent.value_dim if self.latent else self.head_dim)

    @cached_property
    def attention_products(self) -> tuple[tuple[int, int, bool, bool], ...]:
        """The projections as (out, in, out is sharded, in is sharded)."""
        h, x = self.hidden, self.latent
        if x is None:
            return ((self.q_width + 2 * self.kv_width, h, True, False), (h, self.q_width, False, True))
        queries = [(self.q_width, h, True, False)]
        if x.q_rank:
            queries = [(x.q_rank, h, False, False), (self.q_width, x.q_rank, True, False)]
        keys = [(x.kv_rank + x.rope_dim, h, False, False)]
        keys.append((self.heads * (x.nope_dim + x.value_dim), x.kv_rank, True, False))
        return (*queries, *keys, (h, self.value_width, False, True))

    def local_attention_products(self, tp: int) -> tuple[tuple[int, int], ...]:
        """The projections as (out, in) of one rank of tp; key-value heads are repeated where tp exceeds them."""
        if self.latent is None and tp > self.kv_heads:
            out = self.q_width // tp + 2 * self.kv_width // self.kv_heads
            return ((out, self.hidden), (self.hidden, self.q_width // tp))
        return tuple(
            (out // tp if out_sharded else out, inner // tp if in_sharded else inner)
            for out, inner, out_sharded, in_sharded in self.attention_products
        )

    @cached_property
    def attention_params(self) -> int:
        return sum(out * inner for out, inner, _, _ in self.attention_products)

    @cached_property
    def mlp_params(self) -> int:
        """Parameters of one MLP, or of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @cached_property
    def dense_layer_params(self) -> int:
        """Parameters of a layer with a dense MLP."""
        width = self.dense_ffn if self.num_experts and self.dense_ffn else self.ffn
        return self.attention_params + (3 if self.gated else 2) * self.hidden * width

    @cached_property
    def always_params(self) -> int:
        """Parameters of a layer with experts that do not belong to a routed expert."""
        return self.attention_params + self.shared_experts * self.mlp_params + self.num_experts * self.hidden

    @cached_property
    def routed_params(self) -> int:
        """Parameters of all routed experts of a layer."""
        return self.num_experts * self.mlp_params

    @property
    def num_expert_layers(self) -> int:
        return self.num_layers - self.dense_layers if self.num_experts else 0

    @property
    def embedding_params(self) -> int:
        return (self.vocab + self.learned_positions) * self.hidden

    @property
    def head_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def num_params(self) -> int:
        """All parameters, norms left out."""
        experts = self.num_expert_layers * (self.always_params + self.routed_params)
        dense = (self.num_layers - self.num_expert_layers) * self.dense_layer_params
        return dense + experts + self.embedding_params + (0 if self.tied else self.head_params)


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
