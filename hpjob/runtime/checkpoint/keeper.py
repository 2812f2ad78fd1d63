"""When to save, and what is said about it: called at every step boundary of the train loop.

Steps of ``every_steps`` give permanent checkpoints, those of ``ephemeral_every_steps`` ephemeral ones. A save that is
still running when the next is due: an ephemeral one is skipped, a permanent one waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from hpjob.recipe.model import CheckpointSettings
from hpjob.runtime.agreement import AgreedError
from hpjob.runtime.checkpoint.manifest import Kind
from hpjob.runtime.checkpoint.save import Position, SaveResult
from hpjob.runtime.checkpoint.saver import Saver
from hpjob.runtime.records import AttemptRecords

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Started:
    position: Position
    kind: Kind
    stall_s: float


class CheckpointKeeper:
    """Decides at step boundaries what is saved; all ranks decide the same.

    Args:
        saver: Does it.
        settings: When, and whether training goes on meanwhile.
        records: Where it is written down.
        saved_step: Step of the checkpoint that training goes on from; 0 = none.
        on_saved: Called with the step of every checkpoint that is complete.

    Attributes:
        saved_step: Newest complete checkpoint of this run that is known of.
        error: Why the newest save failed; None = it did not.
    """

    def __init__(
        self,
        saver: Saver,
        settings: CheckpointSettings,
        records: AttemptRecords,
        saved_step: int,
        on_saved: Callable[[int], None],
    ) -> None:
        self._saver, self._settings, self._records, self._on_saved = saver, settings, records, on_saved
        self.saved_step = saved_step
        self.error: str | None = None
        self._tried = saved_step
        self._memory_reported = False
        self._started: _Started | None = None

    @property
    def running(self) -> bool:
        """Whether this rank still works on a save."""
        return self._saver.running

    @property
    def newest_in_words(self) -> str:
        """Which checkpoint there is."""
        return f"the newest checkpoint is step {self.saved_step}" if self.saved_step else "there is no checkpoint yet"

    def collect(self) -> None:
        """Take over the save that has ended on all ranks, if there is one."""
        started, result = self._started, self._saver.collect()
        self._started = None
        if started is not None and result is not None:
            self._report(result, started.stall_s)

    def is_due(self, step: int) -> bool:
        """Tell whether a save of this step is on the schedule."""
        return step > self._tried and self._kind(step) is not None

    def is_unsaved(self, step: int) -> bool:
        """Tell whether leaving at this step takes a save, or waiting for one."""
        return step > self.saved_step or self._started is not None

    def save(self, position: Position) -> None:
        """Save a step that is due, in the background if possible. A collective."""
        kind, step = self._kind(position.step), position.step
        if self._started is not None and kind == "ephemeral":
            self._tried = step
            self._records.event("checkpoint-skipped", step=step, kind=kind, running=self._started.position.step)
            return
        self._wait_for_running(step)
        self._start(position, kind or "permanent", wait=not self._settings.asynchronous)

    def save_now(self, position: Position, *, last: bool) -> None:
        """Wait for what runs, then save the current step unless that is done, and wait. A collective.

        Args:
            position: Where training stands.
            last: This is the last step; else the job is about to end, and time is short.
        """
        self._wait_for_running(position.step)
        if position.step > self.saved_step:
            kind: Kind = "permanent" if last or self._kind(position.step) == "permanent" else "ephemeral"
            self._start(position, kind, wait=True, urgent=not last)

    def _kind(self, step: int) -> Kind | None:
        if step % self._settings.every_steps == 0:
            return "permanent"
        often = self._settings.ephemeral_every_steps
        return "ephemeral" if often and step % often == 0 else None

    def _start(self, position: Position, kind: Kind, *, wait: bool, urgent: bool = False) -> None:
        self._tried = position.step
        began = time.perf_counter()
        try:
            stall_s = self._saver.start(position, kind, staged=not wait, urgent=urgent)
        except AgreedError as error:
            seconds = time.perf_counter() - began
            self._report(SaveResult(step=position.step, kind=kind, error=str(error), duration_s=seconds), seconds)
            return
        self._started = _Started(position, kind, stall_s)
        if not wait:
            self._report_memory()
        if wait or self._saver.shortage_bytes:
            self._wait(since=began)

    def _report_memory(self) -> None:
        """Say once what copies of the state cost, or that there is no room for them."""
        short, staged = self._saver.shortage_bytes, self._saver.staged_bytes
        if self._memory_reported:
            return
        self._memory_reported = True
        self._records.event("checkpoint-memory", bytes_per_rank=staged, missing_bytes=short)
        if short:
            log.warning("copies of the state need %.1f GiB more host memory: training waits for saves", short / 2**30)

    def _wait_for_running(self, step: int) -> None:
        if self._started is None:
            return
        running, began = self._started.position.step, time.perf_counter()
        self._wait(since=began - self._started.stall_s)
        waited_s = time.perf_counter() - began
        self._records.event("checkpoint-waited", step=step, running=running, wait_s=waited_s)

    def _wait(self, *, since: float) -> None:
        """Wait for the save that runs; ``since`` is from when on all time counts as standstill."""
        result = self._saver.collect()
        started, self._started = self._started, None
        if started is not None and result is not None:
            self._report(result, time.perf_counter() - since)

    def _report(self, result: SaveResult, stall_s: float) -> None:
        self.error = result.error
        seconds = {"duration_s": result.duration_s, "stall_s": stall_s}
        if result.error is not None:
            details = {"reason": result.error, "newest_checkpoint": self.saved_step}
            self._records.event("checkpoint-failed", step=result.step, kind=result.kind, **seconds, **details)
            log.warning(
                "checkpoint of step %d could not be saved: %s; %s", result.step, result.error, self.newest_in_words
            )
            return
        self.saved_step = result.step
        self._on_saved(result.step)
        self._records.event(
            "checkpoint-saved",
            step=result.step,
            kind=result.kind,
            **seconds,
            write_s=result.write_s,
            size_bytes=result.size_bytes,
            deleted=list(result.deleted),
        )
        log.info(
            "checkpoint of step %d saved in %.2f s, training stood still for %.2f s", result.step, *seconds.values()
        )
        if result.cleanup_error is not None:
            self._records.event("cleanup-failed", step=result.step, reason=result.cleanup_error)
            log.warning("old checkpoints could not be deleted: %s", result.cleanup_error)
