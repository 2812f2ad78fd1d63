"""Runs one rank's table of a pipeline schedule: forward, backward, and the messages between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hpjob.runtime.model.stage import DecoderStage
from hpjob.runtime.parallel.data import GradientSync
from hpjob.runtime.pipeline.schedule import Action, Kind, Schedule, forward_only
from hpjob.runtime.pipeline.transport import Transport
from hpjob.runtime.weight_gradients import WeightGradientQueue


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Part of a batch that goes through the pipeline at once; this rank's part of its sequences.

    Attributes:
        input_ids: (microbatch_size, seq).
        labels: Same shape.
        position_ids: Same shape.
        document_ids: (microbatch_size, whole sequence); None = one document a sequence.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    document_ids: Tensor | None = None


class Head(Protocol):
    """What comes after the logits, where it is not the sum of the token losses."""

    def __call__(self, stage: DecoderStage, logits: Tensor, microbatch: Microbatch, number: int) -> Tensor:
        """Return a scalar.

        Args:
            stage: The last one.
            logits: As it returns them.
            microbatch: This rank's part of its sequences.
            number: Of the microbatch, from 0.
        """


@dataclass(slots=True)
class _StageState:
    """One stage and what is in flight on it."""

    module: DecoderStage
    sync: GradientSync
    queue: WeightGradientQueue | None = None
    backwards_left: int = 0
    """Backward passes of this step that have not come yet; with a queue, weight gradients."""
    saved: dict[int, tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    """Microbatch -> input that wants a gradient, output."""


class PipelineExecutor:
    """Runs this rank's stages through one optimizer step.

    Args:
        schedule: All ranks' tables.
        rank: This rank's position on the pp axis.
        stages: Stage number -> module, its gradient synchronisation, and its queue where weight gradients are
            actions of their own.
        transport: Carries tensors to and from other ranks.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, tuple[DecoderStage, GradientSync, WeightGradientQueue | None]],
        transport: Transport,
    ) -> None:
        self._schedule = schedule
        self._rank = rank
        self._table = schedule.actions[rank]
        self._stages = {number: _StageState(*parts) for number, parts in stages.items()}
        self._transport = transport
        self._handed: dict[Action, Tensor] = {}
        self._loss_sum: Tensor | None = None
        self._head: Head | None = None

    def run(self, microbatches: Sequence[Microbatch], loss_scale: Tensor, head: Head | None = None) -> Tensor | None:
        """Accumulate the gradients of one step.

        Args:
            microbatches: As many as the schedule has; equal on all ranks of a pipeline.
            loss_scale: Scalar tensor that multiplies the summed loss: one over the global number of tokens.
            head: Makes a loss of the logits; None = the sum of the token losses.

        Returns:
            The scaled loss of these microbatches on the rank of the last stage, else None.
        """
        self._loss_sum, self._head = None, head
        for state in self._stages.values():
            state.backwards_left = self._schedule.num_microbatches
        self._transport.begin_step()
        for action in self._receiving_ahead(self._table):
            if action.kind is Kind.FORWARD:
                self._forward(action, microbatches[action.microbatch], loss_scale)
            elif action.kind is Kind.BACKWARD:
                self._backward(action)
            else:
                self._weight_gradients(action)
        for state in self._stages.values():
            state.sync.end_step()
        self._transport.end_step()
        return self._loss_sum

    def evaluate(
        self, microbatches: Sequence[Microbatch], loss_scale: Tensor, head: Head | None = None
    ) -> Tensor | None:
        """Run forward passes alone, over any number of microbatches; arguments and result as of :meth:`run`."""
        self._loss_sum, self._head = None, head
        schedule = forward_only(self._schedule, len(microbatches))
        self._transport.begin_step(schedule)
        with torch.no_grad():
            for action in self._receiving_ahead(schedule.actions[self._rank]):
                self._forward(action, microbatches[action.microbatch], loss_scale)
                self._stages[action.stage].saved.clear()
        self._transport.end_step()
        return self._loss_sum

    def warm_up(self, microbatch: Microbatch, loss_scale: Tensor) -> None:
        """Run every stage forward and backward without messages; leaves gradients that mean nothing.

        Twice where a step has several microbatches: adding to a sum is code of its own.

        On a GPU the first use of a kernel loads code, which may wait until the GPU is idle. Within a step it need never
        be: a receive runs there until another rank sends, and that rank may be loading code as well.

        Args:
            microbatch: Any.
            loss_scale: As of :meth:`run`.
        """
        for number in sorted(self._stages):
            self._warm_up(self._stages[number], microbatch, loss_scale)

    def _warm_up(self, state: _StageState, microbatch: Microbatch, loss_scale: Tensor) -> None:
        for last in (False, True) if self._schedule.num_microbatches > 1 else (True,):
            self._warm_up_pass(state, microbatch, loss_scale, last=last)
        state.sync.end_step()

    def _warm_up_pass(self, state: _StageState, microbatch: Microbatch, loss_scale: Tensor, *, last: bool) -> None:
        module, queue = state.module, state.queue
        received = None if module.part.is_first else self._transport.buffer().zero_().requires_grad_()
        inputs = microbatch.input_ids if received is None else received
        output = module(inputs, microbatch.position_ids, microbatch.document_ids)
        if module.part.is_last:
            output = module.loss_sum(output, microbatch.labels) * loss_scale
        if queue is not None:
            queue.open(microbatch=0)
        state.sync.before_backward(last=last and queue is None, deferred=queue is not None)
        torch.autograd.backward(output, torch.zeros_like(output))
        state.sync.after_backward()
        if queue is not None:
            state.sync.before_deferred(last=last)
            queue.run(microbatch=0)
            state.sync.after_deferred(last=last)

    def _receiving_ahead(self, table: Sequence[Action]) -> Iterator[Action]:
        """Yield the actions of a table with receives posted for the one after."""
        for position, action in enumerate(table):
            for ahead in table[position : position + 2]:
                self._expect_input(ahead)
            yield action

    def _source(self, action: Action) -> Action | None:
        """Return the action on a neighbouring stage that makes this one's input."""
        for needed in self._schedule.requires(action):
            if needed.stage != action.stage:
                return needed
        return None

    def _expect_input(self, action: Action) -> None:
        source = self._source(action)
        if source is not None and self._schedule.stage_rank[source.stage] != self._rank:
            self._transport.expect(source)

    def _take_input(self, action: Action) -> Tensor | None:
        source = self._source(action)
        if source is None:
            return None
        if self._schedule.stage_rank[source.stage] == self._rank:
            return self._handed.pop(source)
        return self._transport.receive(source)

    def _pass_on(self, action: Action, result: Tensor) -> None:
        target = action.stage + (1 if action.kind is Kind.FORWARD else -1)
        if self._schedule.stage_rank[target] == self._rank:
            self._handed[action] = result
        else:
            self._transport.send(action, result)

    def _forward(self, action: Action, microbatch: Microbatch, loss_scale: Tensor) -> None:
        state = self._stages[action.stage]
        received = self._take_input(action)
        if received is not None:
            received.requires_grad_(torch.is_grad_enabled())
        inputs = microbatch.input_ids if received is None else received
        output = state.module(inputs, microbatch.position_ids, microbatch.document_ids)
        if state.module.part.is_last:
            if self._head is None:
                loss_sum = state.module.loss_sum(output, microbatch.labels)
            else:
                loss_sum = self._head(state.module, output, microbatch, action.microbatch)
            output = loss_sum * loss_scale
            loss = output.detach()
            self._loss_sum = loss if self._loss_sum is None else self._loss_sum + loss
        else:
            self._pass_on(action, output.detach())
        state.saved[action.microbatch] = (received, output)

    def _backward(self, action: Action) -> None:
        state = self._stages[action.stage]
        gradient = self._take_input(action)
        inputs, output = state.saved.pop(action.microbatch)
        if state.queue is None:
            state.backwards_left -= 1
            state.sync.before_backward(last=state.backwards_left == 0)
        else:
            state.queue.open(action.microbatch)
            state.sync.before_backward(last=False, deferred=True)
        torch.autograd.backward(output, gradient)
        state.sync.after_backward()
        if inputs is not None:
            if inputs.grad is None:
                raise RuntimeError(f"no gradient reached the input of {action}")
            self._pass_on(action, inputs.grad)

    def _weight_gradients(self, action: Action) -> None:
        state = self._stages[action.stage]
        if state.queue is None:
            raise RuntimeError(f"{action}: this stage computes weight gradients in its backward passes")
        state.backwards_left -= 1
        state.sync.before_deferred(last=state.backwards_left == 0)
        state.queue.run(action.microbatch)
        state.sync.after_deferred(last=state.backwards_left == 0)
