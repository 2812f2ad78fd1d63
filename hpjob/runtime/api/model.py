"""The model that the plugin makes, and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hpjob.core.errors import UserInputError
from hpjob.plan.model import Plan
from hpjob.recipe.model import Recipe
from hpjob.runtime.api.batches import as_mapping, check_vocabulary, to_batch
from hpjob.runtime.api.folder import save_folder
from hpjob.runtime.api.outputs import CausalLMOutput, MergedOutput
from hpjob.runtime.engine import Batch, Engine, StepResult
from hpjob.runtime.hugging_face.load import load_weights
from hpjob.runtime.model.stage import DecoderStage
from hpjob.runtime.pipeline.executor import Microbatch

Criterion = Callable[[CausalLMOutput, Any], Tensor]
_STEP = "progress.step"


class HybridOptimizer:
    """Updates this rank's part of the weights after :meth:`HybridModel.execute_pipeline`.

    Args:
        engine: Holds weights, gradients and moments.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_tokens: Tensor | None = None
        self.num_steps = 0
        """Updates so far; the learning rate follows from it."""

    def step(self) -> StepResult:
        """Clip the gradients over the whole mesh and update. A collective of all ranks.

        Returns:
            Norm, learning rate and tokens; its ``loss`` is that of :meth:`HybridModel.execute_pipeline`, not here.

        Raises:
            UserInputError: There are no gradients.
        """
        if self._num_tokens is None:
            raise UserInputError("there are no gradients", hint="call execute_pipeline before optimizer.step()")
        no_loss = torch.zeros((), dtype=torch.float64, device=self._num_tokens.device)
        self.num_steps += 1
        result = self._engine.apply_gradients(no_loss, self._num_tokens, self.num_steps)
        self._num_tokens = None
        return result

    def zero_grad(self) -> None:
        """Forget gradients that were not used; after :meth:`step` there are none."""
        self._num_tokens = None

    def took_gradients(self, num_tokens: Tensor) -> None:
        """Take note that gradients wait for an update."""
        self._num_tokens = num_tokens

    @property
    def has_gradients(self) -> bool:
        return self._num_tokens is not None


class HybridModel:
    """This rank's part of a model, and what a training script does with it.

    Args:
        engine: Runs it.
        recipe: Model and optimizer settings.
        plan: The layout.
        gathers_logits: Whether outputs have whole logits instead of this tensor-parallel rank's chunk.
    """

    def __init__(self, engine: Engine, recipe: Recipe, plan: Plan, *, gathers_logits: bool) -> None:
        self.engine, self.recipe, self.plan = engine, recipe, plan
        self.optimizer = HybridOptimizer(engine)
        self._gathers_logits = gathers_logits

    def train_step(self, batch: Any) -> StepResult:
        """Do one optimizer step on this data-parallel rank's batch; the same call for every layout.

        Args:
            batch: See :func:`hpjob.runtime.api.batches.to_batch`.

        Returns:
            Loss (exact mean over all valid tokens of the global batch), gradient norm, tokens, learning rate; equal on
            all ranks.
        """
        self._refuse_unused_gradients()
        self.optimizer.num_steps += 1
        return self.engine.train_step(self._batch(batch), self.optimizer.num_steps)

    def evaluate(self, batch: Any) -> tuple[float, int]:
        """Return the mean token loss of a batch of any number of sequences, and its tokens, on all ranks."""
        return self.engine.evaluate(self._batch(batch))

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        criterion: Criterion | None = None,
        optimizer: HybridOptimizer | None = None,
        *,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """See :meth:`hpjob.runtime.api.HybridParallelPlugin.execute_pipeline`."""
        given = next(data_iter)
        batch = self._batch(given)
        if optimizer is None and torch.is_grad_enabled():
            raise UserInputError(
                "execute_pipeline computes gradients, but has no optimizer to leave them to",
                hint="give the optimizer of plugin.configure, or evaluate under torch.no_grad()",
            )
        head = None
        if criterion is not None or return_outputs:
            head = _CriterionHead(self, given, criterion, keeps_logits=return_outputs)
        if optimizer is None or not torch.is_grad_enabled():
            loss = self._forward(batch, head)
        else:
            loss = self._forward_backward(batch, head, optimizer)
        if head is not None and self.engine.has_last_stage:
            loss = head.mean(len(batch.input_ids))
        outputs = head.merged(len(batch.input_ids)) if head is not None and return_outputs else None
        shown = return_loss and self.engine.has_last_stage
        return {"loss": loss if shown else None, "outputs": outputs}

    def __call__(self, batch: Any = None, **inputs: Any) -> MergedOutput | None:
        """Return the logits of a batch on ranks of the last stage, None on others; for every layout, without gradients.

        Raises:
            UserInputError: Gradients are wanted.
        """
        if torch.is_grad_enabled():
            raise UserInputError(
                "a model that is spread over ranks has no loss.backward() of its own: the backward pass is part of the "
                "pipeline",
                hint="call model.train_step(batch), or plugin.execute_pipeline(iter([batch]), model, criterion, "
                "optimizer); for logits alone call the model under torch.no_grad()",
            )
        given = inputs if batch is None else batch
        result: MergedOutput | None = self.execute_pipeline(iter([given]), return_outputs=True)["outputs"]
        return result

    def train(self, mode: bool = True) -> Self:
        """Switch layers to training."""
        for stage in self.engine.stages:
            stage.train(mode)
        return self

    def eval(self) -> Self:
        """Switch layers to evaluation."""
        return self.train(False)

    def save_checkpoint(self, path: str | Path) -> None:
        """Save weights, optimizer and step in a new folder, which any layout loads. A collective of all ranks."""
        state = {**self.engine.state_dict(), _STEP: torch.tensor(self.optimizer.num_steps)}
        save(state, checkpoint_id=Path(path))

    def load_checkpoint(self, path: str | Path) -> None:
        """Load what :meth:`save_checkpoint` saved, from whatever layout. A collective of all ranks.

        Raises:
            UserInputError: There is no checkpoint.
        """
        if not (Path(path) / ".metadata").is_file():
            raise UserInputError(
                f"{path} holds no checkpoint",
                hint="give the folder that model.save_checkpoint wrote, as all ranks see it",
            )
        state = self.engine.state_dict()
        step = torch.tensor(0)
        load({**state, _STEP: step}, checkpoint_id=Path(path))
        self.engine.load_state_dict(state)
        self.optimizer.num_steps = int(step)

    def save_pretrained(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write a Hugging Face folder, which transformers loads. A collective of all ranks.

        Args:
            path: New folder on a file system that all ranks share.
            dtype: Of the files; the weights that are trained are fp32 whatever the precision.
        """
        save_folder(self.engine, self.recipe, Path(path), dtype)

    def load_pretrained(self, path: str | Path) -> None:
        """Take over the weights of a Hugging Face folder, each rank its own part. A collective of all ranks."""
        load_weights(Path(path), self.recipe.model, self.engine.parameters)

    def _batch(self, given: Any) -> Batch:
        batch = to_batch(given, self.plan.seq_length)
        check_vocabulary(batch, self.recipe.model.vocab_size)
        return batch

    def _forward_backward(self, batch: Batch, head: _CriterionHead | None, optimizer: HybridOptimizer) -> Tensor:
        self._refuse_unused_gradients()
        loss, num_tokens = self.engine.accumulate_gradients(batch, head)
        optimizer.took_gradients(num_tokens)
        if head is None:
            dist.all_reduce(loss)
        return loss

    def _forward(self, batch: Batch, head: _CriterionHead | None) -> Tensor:
        return torch.tensor(self.engine.evaluate(batch, head)[0], dtype=torch.float64)

    def _refuse_unused_gradients(self) -> None:
        if self.optimizer.has_gradients:
            raise UserInputError(
                "the gradients of the last batch were not used",
                hint="call optimizer.step() or optimizer.zero_grad(); to accumulate over more sequences, raise "
                "global_batch_size, which num_microbatches follows",
            )


class _CriterionHead:
    """Calls a criterion of the user's on each microbatch, and keeps what is to be returned."""

    def __init__(self, model: HybridModel, given: Any, criterion: Criterion | None, *, keeps_logits: bool) -> None:
        self._model = model
        self._given = given
        self._criterion = criterion or (lambda outputs, _: outputs.loss)
        self._keeps_logits = keeps_logits
        self._size = model.plan.pipeline.microbatch_size
        self._losses: list[Tensor] = []
        self._logits: list[Tensor] = []

    def __call__(self, stage: DecoderStage, logits: Tensor, microbatch: Microbatch, number: int) -> Tensor:
        """Return the criterion of a microbatch."""
        outputs = CausalLMOutput(
            self._model.engine, stage, logits, microbatch, gathers_vocabulary=self._model._gathers_logits
        )
        loss = self._criterion(outputs, self._part(number))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UserInputError(
                f"the criterion returned {type(loss).__name__} of shape {tuple(getattr(loss, 'shape', ()))}",
                hint="return a tensor with one element, such as outputs.loss",
            )
        self._losses.append(loss.detach())
        if self._keeps_logits:
            self._logits.append(outputs.logits.detach())
        return loss.reshape(())

    def mean(self, num_sequences: int) -> Tensor:
        """Mean over the microbatches; those that only fill up the last one are none."""
        count = max(1, -(-num_sequences // self._size))
        return torch.stack([loss.reshape(()) for loss in self._losses[:count]]).mean()

    def merged(self, num_sequences: int) -> MergedOutput | None:
        """Outputs of the whole batch on ranks of the last stage."""
        return MergedOutput(torch.cat(self._logits)[:num_sequences]) if self._logits else None

    def _part(self, number: int) -> Any:
        begin = number * self._size
        part = slice(begin, begin + self._size)
        if isinstance(self._given, Batch):
            b = self._given
            documents = None if b.document_ids is None else b.document_ids[part]
            return Batch(
                input_ids=b.input_ids[part],
                labels=b.labels[part],
                position_ids=b.position_ids[part],
                document_ids=documents,
            )
        return {key: value[part] for key, value in as_mapping(self._given).items()}
