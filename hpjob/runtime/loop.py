"""The train loop: steps, records, saves, and the agreement to stop at a step boundary."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Protocol

from hpjob.core.errors import EnvironmentProblemError
from hpjob.core.run_records import Outcome
from hpjob.plan.model import Plan
from hpjob.recipe.model import Recipe
from hpjob.runtime.agreement import StopAgreement
from hpjob.runtime.checkpoint.keeper import CheckpointKeeper
from hpjob.runtime.checkpoint.manifest import Manifest
from hpjob.runtime.checkpoint.save import Position
from hpjob.runtime.data.batches import BatchReader
from hpjob.runtime.engine import Batch, StepResult
from hpjob.runtime.failures import FailureReporter
from hpjob.runtime.health.loss_watch import Finding, LossWatch, as_fields
from hpjob.runtime.records import AttemptRecords
from hpjob.runtime.rendezvous import set_timeout
from hpjob.runtime.signals import describe
from hpjob.runtime.timeouts import Timeouts

log = logging.getLogger(__name__)


class TrainEngine(Protocol):
    """The engine as the loop sees it."""

    def train_step(self, batch: Batch, step: int) -> StepResult:
        """Do one optimizer step (1-based)."""

    def state_dict(self) -> dict[str, object]:
        """Return the state for a checkpoint."""

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take over a loaded state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Everything the loop works with."""

    recipe: Recipe
    plan: Plan
    engine: TrainEngine
    batches: BatchReader
    keeper: CheckpointKeeper
    stop: StopAgreement
    records: AttemptRecords
    reporter: FailureReporter
    losses: LossWatch
    timeouts: Timeouts


class TrainLoop:
    """Trains from one step to the last, or until the ranks agree to stop.

    Args:
        training: Parts of the run.
        resumed: Checkpoint that the engine was loaded from; None = from the beginning.
    """

    def __init__(self, training: Training, resumed: Manifest | None) -> None:
        self._t = training
        self._step = resumed.step if resumed else 0
        self._lr = resumed.lr if resumed else 0.0
        self._first_step = self._step + 1

    def run(self) -> Outcome:
        """Train; return how it ended, after writing it down.

        Raises:
            EnvironmentProblemError: The checkpoint of the last step could not be written.
        """
        keeper, total = self._t.keeper, self._t.recipe.training.steps
        while True:
            code, saving = self._t.stop.check_with(keeper.running)
            if not saving:
                keeper.collect()
            done = self._step >= total
            leaving = done or bool(code)
            if keeper.is_unsaved(self._step) if leaving else keeper.is_due(self._step):
                self._save(leaving=leaving, last=done)
                if not code and not keeper.is_unsaved(self._step):
                    # A request that came while training waited for this save needs no second one.
                    code = self._t.stop.check()
            if done:
                return self._finish()
            if code:
                return self._leave(code)
            self._train_step()

    def _train_step(self) -> None:
        step = self._step + 1
        self._t.reporter.step = step
        progress = self._t.reporter.progress
        progress.begin_step(step)
        started = time.perf_counter()
        batch = self._t.batches.read(step)
        progress.begin_compute(step)
        result = self._t.engine.train_step(batch, step)
        duration = time.perf_counter() - started
        progress.end_step(duration)
        self._step, self._lr = step, result.lr
        if step == self._first_step:
            # Only now are compilation and the first connections of every group behind us.
            set_timeout(self._t.timeouts.step_s)
            self._t.records.event("first-step", step=step, duration_s=duration)
        finding = self._t.losses.take(result)
        self._record(result, duration, as_fields(finding, result))
        if finding is not None:
            self._report_loss(finding)

    def _report_loss(self, finding: Finding) -> None:
        step, positions = self._step, self._t.batches.positions(self._step)
        self._t.records.event("loss-fault", step=step, positions=positions, **asdict(finding))
        log.warning("step %d, samples %d to %d: %s (%s)", step, *positions, finding.words, finding.policy)
        self._t.losses.check(finding, step, positions)

    def _record(self, result: StepResult, duration: float, remarks: dict[str, Any]) -> None:
        tokens_per_s = result.num_tokens / duration
        self._t.records.metrics(
            {
                "step": self._step,
                "loss": result.loss,
                # JSON has no infinity; a norm that is not finite is that of an fp16 overflow.
                "grad_norm": result.grad_norm if isfinite(result.grad_norm) else None,
                "lr": result.lr,
                "tokens": result.num_tokens,
                "tokens_per_s": tokens_per_s,
                "step_time_s": duration,
                "attempt": self._t.reporter.rank.attempt.index,
                "time": time.time(),
                **remarks,
            }
        )
        total = self._t.recipe.training.steps
        if self._step % self._t.recipe.training.log_every == 0 or self._step == total:
            log.info(
                "step %d/%d  loss %.4f  grad norm %.3f  lr %.3g  %.0f tokens/s  %.3f s",
                *(self._step, total, result.loss, result.grad_norm, result.lr, tokens_per_s, duration),
            )

    def _save(self, *, leaving: bool, last: bool) -> None:
        """Save the current step on all ranks, in the background unless training ends here."""
        position = Position(
            step=self._step,
            num_samples=self._step * self._t.recipe.training.global_batch_size,
            lr=self._lr,
            attempt=self._t.reporter.rank.attempt.index,
        )
        set_timeout(self._t.timeouts.setup_s)
        with self._t.reporter.progress.during("save"):
            if leaving:
                self._t.keeper.save_now(position, last=last)
            else:
                self._t.keeper.save(position)
        set_timeout(self._t.timeouts.step_s)

    def _finish(self) -> Outcome:
        keeper = self._t.keeper
        if keeper.is_unsaved(self._step):
            raise EnvironmentProblemError(
                f"the checkpoint of the last step could not be saved: {keeper.error}; {keeper.newest_in_words}",
                hint="make room or correct the permissions of the run folder, then `hpjob resume` the run",
            )
        self._t.records.finished(self._step)
        return self._end(Outcome(kind="finished", step=self._step, reason="all steps done", time=time.time()))

    def _leave(self, code: int) -> Outcome:
        keeper = self._t.keeper
        reason = describe(code)
        if keeper.is_unsaved(self._step):
            reason += f"; the checkpoint of step {self._step} could not be saved ({keeper.error}); "
            reason += keeper.newest_in_words
        outcome = self._end(Outcome(kind="preempted", step=keeper.saved_step, reason=reason, time=time.time()))
        self._t.records.remove_stop_file()
        return outcome

    def _end(self, outcome: Outcome) -> Outcome:
        self._t.records.outcome(outcome)
        self._t.records.event(outcome.kind, step=outcome.step, reason=outcome.reason)
        log.info("%s at step %d: %s", outcome.kind, outcome.step, outcome.reason)
        return outcome
