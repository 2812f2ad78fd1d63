"""One pipeline stage: some decoder layers, and embedding or head at the ends.

Submodules carry the names of a transformers causal language model, so parameter names are global:
``model.layers.3.mlp.up_proj.weight`` is the same parameter on whatever rank it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpjob.plan.model import Plan
from hpjob.recipe.model import ModelShape
from hpjob.runtime.model.families import Family
from hpjob.runtime.model.placement import place_layer
from hpjob.runtime.moe.expert_parallel import ExpertParallelExperts
from hpjob.runtime.optimizer.master import MasterWeight
from hpjob.runtime.parallel.fp8 import Fp8Product
from hpjob.runtime.parallel.linear import ColumnParallelLinear, DeferringLinear, local_tensor, multiply_gathered
from hpjob.runtime.parallel.region import chunk_bounds
from hpjob.runtime.parallel.tensor_region import TensorRegion
from hpjob.runtime.parallel.vocabulary import VocabularyParallelEmbedding, cross_entropy_sum
from hpjob.runtime.sequence.attention_interface import AttentionKernel, install_attention
from hpjob.runtime.sequence.split_gather import gather_linear
from hpjob.runtime.weight_gradients import WeightGradientQueue

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePart:
    """What a stage holds of the whole model."""

    index: int
    layers: range
    is_first: bool
    is_last: bool


def stage_parts(layers_per_stage: Sequence[int]) -> list[StagePart]:
    """Return the part of every stage, in model order."""
    parts = []
    begin = 0
    for index, count in enumerate(layers_per_stage):
        parts.append(
            StagePart(
                index=index,
                layers=range(begin, begin + count),
                is_first=index == 0,
                is_last=index == len(layers_per_stage) - 1,
            )
        )
        begin += count
    return parts


class DecoderStage(nn.Module):
    """A stage on the meta device, cut over the tensor-parallel group.

    Args:
        family: Classes and placements.
        shape: The whole model's shape.
        part: Layers and ends that this stage holds.
        plan: Recomputation policy.
        region: Edges of the tensor-parallel region.
        kernel: Attention of all layers.
    """

    def __init__(
        self,
        family: Family,
        shape: ModelShape,
        part: StagePart,
        plan: Plan,
        region: TensorRegion,
        kernel: AttentionKernel,
    ) -> None:
        super().__init__()
        self.part = part
        self.shape = shape
        self.region = region
        self.tied = shape.tie_word_embeddings
        self.recomputed = _recomputed(plan, part)
        self.vocab_begin, _ = chunk_bounds(shape.vocab_size, region.size, region.rank)
        self._family = family
        self._config = family.config(shape)
        self.model = nn.Module()
        with torch.device("meta"):
            layers = {str(i): family.layer(self._config, i) for i in part.layers}
            self.model.layers = nn.ModuleDict(layers)
            if part.is_first:
                self.model.embed_tokens = VocabularyParallelEmbedding(
                    shape.vocab_size, shape.hidden_size, region=region
                )
            if part.is_last:
                self.model.norm = family.norm(self._config)
                if not (self.tied and part.is_first):
                    self.lm_head = ColumnParallelLinear(
                        shape.hidden_size, shape.vocab_size, bias=False, tp_mesh=region.mesh
                    )
        for layer in layers.values():
            place_layer(layer, family, shape, region)
        install_attention(self.model.layers, kernel)

    def make_rotary(self, device: torch.device) -> None:
        """Make the rotary buffers; they are computed, not loaded, and need a real device."""
        with device:
            self.rotary = self._family.rotary(self._config)

    def defer_weight_gradients(self, queue: WeightGradientQueue) -> None:
        """Let all linear layers and experts leave their weight gradients to a queue."""
        for module in self.modules():
            if isinstance(module, DeferringLinear):
                module.put_off_gradients(queue)
            elif isinstance(module, ExpertParallelExperts):
                module.queue = queue

    def sum_weight_gradients(self, sums: Mapping[nn.Parameter, MasterWeight], *, over_microbatches: bool) -> None:
        """Let layers hand the gradients of these weights to their sums in the backward pass.

        Args:
            sums: By weight.
            over_microbatches: The sums are of several microbatches. That of one alone, autograd makes for an embedding.
        """
        kinds = (DeferringLinear, VocabularyParallelEmbedding) if over_microbatches else DeferringLinear
        for module in self.modules():
            if isinstance(module, kinds) and module.weight in sums:
                module.sum_gradients(sums[module.weight])

    def multiply_in_fp8(self, product: Fp8Product) -> None:
        """Let the linear layers of the decoder layers multiply in 8 bits; embedding, head and experts do not."""
        for layer in self.decoder_layers:
            for module in layer.modules():
                if isinstance(module, DeferringLinear):
                    module.fp8 = product

    @property
    def expert_block(self) -> str | None:
        """Name of the module of a decoder layer that has experts; None = there is none."""
        return self._family.expert_block

    @property
    def norm_start(self) -> float:
        """Initial gain of the norms."""
        return self._family.norm_start

    def head_norms(self) -> list[nn.Module]:
        """Norms that act on this rank's attention heads only."""
        return [layer.get_submodule(name) for layer in self.decoder_layers for name in self._family.head_norms]

    @property
    def decoder_layers(self) -> list[nn.Module]:
        """This stage's decoder layers, in model order."""
        return list(self.model.layers.values())  # type: ignore[operator]

    def global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters by global name; a tied head on another stage carries the embedding's name."""
        for name, parameter in self.named_parameters():
            yield (EMBEDDING if self.tied and name == HEAD else name), parameter

    def forward(self, inputs: Tensor, position_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Run the stage.

        Args:
            inputs: Token ids (batch, seq) on the first stage, else hidden states (batch, seq, hidden), or, where
                the region splits the sequence, this rank's part of (1, batch * seq, hidden).
            position_ids: (batch, seq), of all tokens that meet in attention's linear layers.
            document_ids: (batch, whole sequence); tokens see only their own document. None = one a sequence.

        Returns:
            Hidden states, like the ``inputs`` of a later stage; on the last stage this rank's chunk of the logits,
            (batch, seq, vocab chunk).
        """
        hidden = self._embed(inputs) if self.part.is_first else inputs
        arguments: dict[str, Any] = {
            "position_ids": position_ids,
            "position_embeddings": self.rotary(hidden, position_ids),
            "attention_mask": None,
        }
        if document_ids is not None:
            arguments["document_ids"] = document_ids
        for number, layer in enumerate(self.decoder_layers):
            hidden = _run_layer(layer, hidden, arguments, recompute=number in self.recomputed and self.training)
        return self._logits(hidden) if self.part.is_last else hidden

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the token losses of one microbatch, fp32."""
        return cross_entropy_sum(logits, labels, begin=self.vocab_begin, group=self.region.group)

    def _embed(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self.model.embed_tokens(input_ids)  # type: ignore[operator]
        if not self._family.scales_embedding:
            return hidden
        # Rounded like the activations, as transformers does.
        return hidden * torch.tensor(self.shape.hidden_size**0.5, dtype=hidden.dtype, device=hidden.device)

    def _logits(self, hidden: Tensor) -> Tensor:
        hidden = self.model.norm(hidden)  # type: ignore[operator]
        if self.tied and self.part.is_first:
            weight = local_tensor(self.model.embed_tokens.weight)  # type: ignore[union-attr,arg-type]
            if self.region.multiplies_while_gathering:
                (product,) = gather_linear(hidden, [weight], self.region.linear_settings(None))
                return self.region.as_sequences(product)
            return F.linear(self.region.enter(hidden), weight)
        if self.region.multiplies_while_gathering:
            multiply_gathered(hidden, [self.lm_head], self.region)
        else:
            hidden = self.region.enter(hidden)
        logits: Tensor = self.lm_head(hidden)
        return logits


def _recomputed(plan: Plan, part: StagePart) -> range:
    """Return which of a stage's layers run again in the backward pass, counted from its first."""
    if plan.recompute != "full":
        return range(0)
    if plan.recompute_layers_per_stage is not None:
        return range(plan.recompute_layers_per_stage[part.index])
    return range(0, len(part.layers), plan.recompute_every_kth_layer)


def _run_layer(layer: Callable[..., Any], hidden: Tensor, arguments: dict[str, Any], *, recompute: bool) -> Tensor:
    if recompute:
        output = checkpoint(layer, hidden, use_reentrant=False, preserve_rng_state=False, **arguments)
    else:
        output = layer(hidden, **arguments)
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result
