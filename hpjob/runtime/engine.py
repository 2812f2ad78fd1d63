"""The training engine: one optimizer step for any layout, with the numbers of one process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from hpjob.core.errors import UserInputError
from hpjob.plan.model import Axis, Plan
from hpjob.recipe.model import Recipe
from hpjob.runtime.mesh import Mesh, add_expert_mesh
from hpjob.runtime.model.compiled import wants_compile
from hpjob.runtime.model.parameters import Fill, ShardedParameter, fill_from_seed
from hpjob.runtime.model.stage import DecoderStage
from hpjob.runtime.optimizer.adamw import AdamW, copy_local
from hpjob.runtime.optimizer.gradients import add_gradients, copy_gradients, local_squared_norm, sum_gradients
from hpjob.runtime.optimizer.loss_scale import LossScale
from hpjob.runtime.optimizer.schedule import learning_rate
from hpjob.runtime.parallel.data import COMPUTE_DTYPE, counting_group
from hpjob.runtime.parallel.vocabulary import IGNORED_LABEL
from hpjob.runtime.pipeline.executor import Head, Microbatch, PipelineExecutor
from hpjob.runtime.pipeline.schedule import Schedule, build_schedule
from hpjob.runtime.pipeline.transport import Transport
from hpjob.runtime.sequence.attention_interface import describe_attention
from hpjob.runtime.sequence.sequence_split import SequenceSplit, sequence_split
from hpjob.runtime.stage_builder import StageBuilder
from hpjob.runtime.support import refuse_unsupported

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one data-parallel rank gets for one optimizer step; the same on all its pp, sp and tp ranks.

    Attributes:
        input_ids: (num_microbatches * microbatch_size, seq_length), int64.
        labels: Same shape; ``labels[b, t]`` is the target of position t (already shifted), -100 = none.
        position_ids: Same shape.
        document_ids: Same shape, integer: packed sequences, whose tokens see only their own document; None = one
            document a sequence.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    document_ids: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """One step's figures, equal on all ranks.

    Attributes:
        loss: Exact mean over all valid tokens of the global batch.
        grad_norm: Before clipping, over the whole mesh.
        num_tokens: Valid tokens of the global batch.
        lr: Learning rate of the update.
        updated: False = the update was left out.
    """

    loss: float
    grad_norm: float
    num_tokens: int
    lr: float
    updated: bool = True


class Engine:
    """Model, optimizer and pipeline of this rank.

    Args:
        plan: The layout.
        recipe: Model, optimizer, seed, number of steps.
        mesh: From :func:`hpjob.runtime.mesh.build_mesh`.
        device: Of this rank.

    Raises:
        UserInputError: The runtime cannot run this plan; one line a reason.
    """

    executor_class: ClassVar[type[PipelineExecutor]] = PipelineExecutor
    transport_class: ClassVar[type[Transport]] = Transport
    fill_weights: ClassVar[Fill] = staticmethod(fill_from_seed)

    def __init__(self, plan: Plan, recipe: Recipe, mesh: Mesh, device: torch.device) -> None:
        refuse_unsupported(plan, recipe)
        mesh = add_expert_mesh(mesh, plan) if recipe.model.num_experts else mesh
        self._plan, self._recipe, self._mesh, self._device = plan, recipe, mesh, device
        self._rank = mesh.coordinate(Axis.PP)
        self._split = sequence_split(plan.seq_length, plan.sequence_parallelism_mode, mesh)
        self._schedule = build_schedule(plan.pipeline, plan.degrees.pp)
        builder = StageBuilder(plan, recipe, mesh, device, self._schedule.defers_weights, self.fill_weights)
        self._region = builder.region
        built = {number: builder.build(number) for number in self._schedule.stages_of(self._rank)}
        self.parameters: list[ShardedParameter] = [item for stage in built.values() for item in stage.parameters]
        """All parameters of this rank."""
        self.stages: list[DecoderStage] = [stage.module for stage in built.values()]
        """This rank's stages, in model order."""
        self.attention = describe_attention(self.stages[0], COMPUTE_DTYPE[plan.precision], device)
        """Which attention runs, and why."""
        if mesh.rank == 0:
            log.info("attention is %s", self.attention)
        stages = {number: (stage.module, stage.sync, stage.queue) for number, stage in built.items()}
        self._executor = self.executor_class(self._schedule, self._rank, stages, self._transport())
        self._tied_group = _tied_group(self._schedule, mesh) if recipe.model.tie_word_embeddings else None
        self._counting_group = counting_group(plan, mesh)
        self._is_warm = False
        self.loss_scale = LossScale(recipe.parallel.initial_scale) if plan.precision == "fp16" else None
        """Only in fp16."""
        self.accepts_update: Callable[[float, float], bool] | None = None
        """Asked with loss and gradient norm before each update, the same on all ranks; None = all are made."""
        compiles = wants_compile(recipe, device) and not plan.cpu_offload
        self.optimizer = AdamW(self.parameters, recipe.optimizer, compiled=compiles)

    def train_step(self, batch: Batch, step: int) -> StepResult:
        """Run one optimizer step.

        Args:
            batch: This data-parallel rank's sequences.
            step: 1-based; decides the learning rate.
        """
        loss, num_tokens = self.accumulate_gradients(batch)
        return self.apply_gradients(loss, num_tokens, step)

    def accumulate_gradients(self, batch: Batch, head: Head | None = None) -> tuple[Tensor, Tensor]:
        """Run forward and backward of all microbatches; gradients are then whole and not clipped.

        Args:
            batch: This data-parallel rank's sequences.
            head: Makes the loss of a microbatch; gradients are of its mean over all microbatches of all
                data-parallel ranks then. None = the mean token loss.

        Returns:
            This rank's part of the mean loss (fp64, to be summed over all ranks) and the number of valid
            tokens of the global batch.
        """
        self._check_shape(batch, self._plan.pipeline.num_microbatches)
        self._warm_up_once(batch)
        self._clear_gradients()
        num_tokens = self._count_tokens(batch)
        microbatches = list(self._microbatches(batch))
        loss = self._executor.run(microbatches, self.gradient_scale / self._divisor(num_tokens, head), head)
        partial = [p for p in self.parameters if p.partial_over_tp]
        sum_gradients(partial, self._mesh.group(Axis.TP), self._device)
        copied = [p for p in self.parameters if p.copied_over_tp]
        copy_gradients(copied, self._mesh.group(Axis.TP), self._device)
        if self._recipe.model.tie_word_embeddings:
            self._sum_tied_gradients()
        return self._counted_part(loss, self.gradient_scale), num_tokens

    def apply_gradients(self, loss: Tensor, num_tokens: Tensor, step: int) -> StepResult:
        """Clip over the whole mesh and update; arguments as :meth:`accumulate_gradients` returns them.

        Gradients that overflowed in fp16 update nothing: the result's norm is then not finite. Nor does a step that
        :attr:`accepts_update` refuses.
        """
        sums = torch.stack([loss, local_squared_norm(self.parameters, self._device)])
        dist.all_reduce(sums)
        scale = self.gradient_scale
        norm = sums[1].sqrt() / scale
        lr = learning_rate(self._recipe.optimizer, step, self._recipe.training.steps)
        updates = self._may_update(sums[0], norm)
        if updates:
            self.optimizer.step(lr, norm, scale)
        figures = torch.stack([sums[0], norm, num_tokens.double()]).tolist()
        return StepResult(loss=figures[0], grad_norm=figures[1], num_tokens=int(figures[2]), lr=lr, updated=updates)

    def _may_update(self, loss: Tensor, norm: Tensor) -> bool:
        """Tell whether an update may be made; one that is refused leaves the loss scale as it is, too."""
        overflowed = self.loss_scale is not None and not isfinite(norm.item())
        if self.accepts_update is not None and not overflowed and not self.accepts_update(loss.item(), norm.item()):
            return False
        return self.loss_scale is None or self.loss_scale.accepts(norm.item())

    def evaluate(self, batch: Batch, head: Head | None = None) -> tuple[float, int]:
        """Return the mean token loss of a batch, and its number of valid tokens, without training on it.

        Args:
            batch: Any number of sequences, as many on every data-parallel rank.
            head: Takes the logits of each microbatch, the last of which may be a filler; the loss means nothing then.
        """
        size = self._plan.pipeline.microbatch_size
        batch = _fill_up(batch, -len(batch.input_ids) % size)
        self._check_shape(batch, len(batch.input_ids) // size)
        self._warm_up_once(batch)
        num_tokens = self._count_tokens(batch)
        microbatches = list(self._microbatches(batch))
        loss = self._executor.evaluate(microbatches, 1.0 / self._divisor(num_tokens, head), head)
        total = self._counted_part(loss, 1.0)
        dist.all_reduce(total)
        return total.item(), int(num_tokens.item())

    def warm_up(self, batch: Batch) -> None:
        """Load all code that a step runs, before ranks wait for each other; gradients are cleared.

        Args:
            batch: At least one microbatch of this data-parallel rank; a collective call of all ranks.
        """
        self._is_warm = True
        with torch.enable_grad():
            self._executor.warm_up(next(self._microbatches(batch)), torch.ones((), device=self._device))
        self._clear_gradients()

    def _warm_up_once(self, batch: Batch) -> None:
        if not self._is_warm and self._device.type == "cuda" and self._mesh.size(Axis.PP) > 1:
            self.warm_up(batch)

    def _clear_gradients(self) -> None:
        for item in self.parameters:
            item.clear_gradient()

    def state_dict(self) -> dict[str, Any]:
        """Return weights and optimizer state under global names, as DTensors that say how they are cut.

        Tensors are the live ones: torch's distributed checkpoint saves them from any mesh and fills them
        in place on any other mesh.
        """
        weights = {item.name: item.weight for item in self.parameters}
        scale = {} if self.loss_scale is None else self.loss_scale.state_dict()
        return {**weights, **self.optimizer.state_dict(), **scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of the form of :meth:`state_dict`, usually that very one, filled in place.

        Raises:
            KeyError: A parameter or moment of this rank is missing.
        """
        with torch.no_grad():
            for item in self.parameters:
                copy_local(item.local, state[item.name])
                item.publish()
            self.optimizer.load_state_dict(state)
            if self.loss_scale is not None:
                self.loss_scale.load_state_dict(state)

    @property
    def mesh(self) -> Mesh:
        """Groups and coordinates of this rank."""
        return self._mesh

    @property
    def split(self) -> SequenceSplit:
        """Which part of every sequence this rank works on."""
        return self._split

    @property
    def has_last_stage(self) -> bool:
        """Whether losses and logits are made on this rank."""
        return self._schedule.stage_rank[-1] == self._rank

    @property
    def gradient_scale(self) -> float:
        """What gradients are multiplied with before :meth:`apply_gradients`; 1 unless the precision is fp16."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def _sum_tied_gradients(self) -> None:
        copies = [p for p in self.parameters if p.is_embedding]
        if self._tied_group is not None:
            sum_gradients(copies, self._tied_group, self._device)
        elif len(copies) > 1:
            add_gradients(copies)

    def _transport(self) -> Transport:
        plan = self._plan
        shape = self._region.shape_outside(self._split.local_length, self._recipe.model.hidden_size)
        return self.transport_class(
            self._schedule, self._mesh, shape=shape, dtype=COMPUTE_DTYPE[plan.precision], device=self._device
        )

    def _divisor(self, num_tokens: Tensor, head: Head | None) -> Tensor:
        """What the losses of all microbatches are divided by."""
        if head is None:
            return num_tokens.clamp(min=1).float()
        return torch.full_like(num_tokens, self._mesh.dp_size * self._plan.pipeline.num_microbatches).float()

    def _counted_part(self, loss: Tensor | None, scale: float) -> Tensor:
        """This rank's part of the loss, once per tensor-parallel group."""
        if loss is None or self._mesh.coordinate(Axis.TP):
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return loss.double() / scale

    def _check_shape(self, batch: Batch, num_microbatches: int) -> None:
        expected = (num_microbatches * self._plan.pipeline.microbatch_size, self._plan.seq_length)
        for name in ("input_ids", "labels", "position_ids", "document_ids"):
            tensor = getattr(batch, name)
            found = expected if tensor is None else tuple(tensor.shape)
            if found != expected:
                raise UserInputError(
                    f"batch.{name} has shape {found}, the plan needs {expected}",
                    hint="give num_microbatches * microbatch_size sequences of seq_length tokens",
                )

    def _count_tokens(self, batch: Batch) -> Tensor:
        count = (batch.labels != IGNORED_LABEL).sum().to(self._device)
        counts_here = all(self._mesh.coordinate(axis) == 0 for axis in (Axis.PP, Axis.SP, Axis.TP))
        total = count if counts_here else torch.zeros_like(count)
        dist.all_reduce(total, group=self._counting_group)
        return total

    def _microbatches(self, batch: Batch) -> Iterator[Microbatch]:
        size, split, device = self._plan.pipeline.microbatch_size, self._split, self._device
        tensors = [
            split.take(split.pad(batch.input_ids.to(device, non_blocking=True), 0)),
            split.take(split.pad(batch.labels.to(device, non_blocking=True), IGNORED_LABEL)),
            split.take(split.pad_positions(batch.position_ids.to(device, non_blocking=True))),
        ]
        if batch.document_ids is not None:
            tensors.append(split.pad(batch.document_ids.to(device, non_blocking=True), -1))
        for parts in zip(*(torch.split(tensor, size) for tensor in tensors), strict=True):
            yield Microbatch(*parts)


def _fill_up(batch: Batch, missing: int) -> Batch:
    """Append sequences that count nothing."""
    if not missing:
        return batch

    def longer(tensor: Tensor, fill: int | None = None) -> Tensor:
        rows = tensor[-1:].expand(missing, -1)
        return torch.cat([tensor, rows if fill is None else torch.full_like(rows, fill)])

    return Batch(
        input_ids=longer(batch.input_ids),
        labels=longer(batch.labels, IGNORED_LABEL),
        position_ids=longer(batch.position_ids),
        document_ids=None if batch.document_ids is None else longer(batch.document_ids),
    )


def _tied_group(schedule: Schedule, mesh: Mesh) -> dist.ProcessGroup | None:
    """Return the group of first and last stage, which hold the two copies of a tied embedding."""
    first, last = schedule.stage_rank[0], schedule.stage_rank[-1]
    return None if first == last else mesh.pipeline_group((first, last))
