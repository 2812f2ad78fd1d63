"""The engine with no neighbours in its pipeline and a clock on every action."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hpjob.runtime.engine import Engine
from hpjob.runtime.model.parameters import fill_quickly
from hpjob.runtime.pipeline.executor import Microbatch, PipelineExecutor
from hpjob.runtime.pipeline.schedule import Action, Kind
from hpjob.runtime.pipeline.transport import Transport


class SilentTransport(Transport):
    """Messages to other pipeline ranks go nowhere; those from them are noise of unit variance."""

    def expect(self, action: Action) -> None:
        """Nothing has to be posted."""

    def receive(self, action: Action) -> Tensor:
        """Return noise."""
        return torch.randn(self._shape, dtype=self._dtype, device=self._device)

    def send(self, action: Action, tensor: Tensor) -> None:
        """Drop a result."""

    def _connect(self) -> None:
        """Nobody is there."""


class Stopwatch:
    """Times pieces of work on a device without waiting for it in between."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Any, Any, Any]] = []

    @contextmanager
    def measure(self, key: object) -> Iterator[None]:
        """Time what is done inside under a key."""
        begin = self._now()
        yield
        self._marks.append((key, begin, self._now()))

    def medians(self) -> dict[Any, float]:
        """Return the median seconds of each key, and forget them; the device must be idle."""
        times: dict[Any, list[float]] = defaultdict(list)
        for key, begin, end in self._marks:
            times[key].append(begin.elapsed_time(end) / 1e3 if self._on_gpu else end - begin)
        self._marks.clear()
        return {key: median(values) for key, values in times.items()}

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class TimedExecutor(PipelineExecutor):
    """Times every action under its kind and stage."""

    watch: Stopwatch

    def _forward(self, action: Action, microbatch: Microbatch, loss_scale: Tensor) -> None:
        self._timed(action, lambda: super(TimedExecutor, self)._forward(action, microbatch, loss_scale))

    def _backward(self, action: Action) -> None:
        self._timed(action, lambda: super(TimedExecutor, self)._backward(action))

    def _weight_gradients(self, action: Action) -> None:
        self._timed(action, lambda: super(TimedExecutor, self)._weight_gradients(action))

    def _timed(self, action: Action, work: Callable[[], None]) -> None:
        with self.watch.measure((action.kind, action.stage)):
            work()


class TimedEngine(Engine):
    """An engine whose pipeline neighbours are silent, with the time of its actions."""

    executor_class = TimedExecutor
    transport_class = SilentTransport
    fill_weights = staticmethod(fill_quickly)

    def times(self, watch: Stopwatch) -> None:
        """Have a stopwatch take the time of every action from now on."""
        executor = self._executor
        if not isinstance(executor, TimedExecutor):
            raise TypeError("the executor of a rehearsal must take times")
        executor.watch = watch


def stage_seconds(medians: dict[Any, float], stage: int) -> tuple[float, float, float | None]:
    """Return forward, backward and deferred weight seconds of a stage."""
    return (
        medians[Kind.FORWARD, stage],
        medians[Kind.BACKWARD, stage],
        medians.get((Kind.WEIGHT, stage)),
    )
