"""Losses that are no numbers or far above the usual: found, reported, and by policy left out of training."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, Literal

from hpjob.core.errors import UserInputError
from hpjob.core.run_records import read_json_lines
from hpjob.recipe.model import LossPolicy, LossWatchSettings
from hpjob.runtime.engine import StepResult

LEAST_HISTORY = 16
"""With fewer losses before it none can be called unusual."""
MOST_SKIPS = 10
"""Updates left out in a row after which training stops: what follows would be no training."""
_MAD_TO_SIGMA = 1.4826
_LEAST_SCALE = 0.002
"""Of the usual loss: a curve as smooth as a line makes no small bump a spike."""


class LossFaultError(UserInputError):
    """The recipe says that training stops for such a loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What is wrong with the loss of a step."""

    kind: Literal["nan", "spike"]
    policy: LossPolicy
    loss: float
    grad_norm: float
    usual: float | None
    """Median of the losses before it."""
    z: float | None
    """How many robust standard deviations it lies above; None where it is no number."""

    @property
    def words(self) -> str:
        """The finding in words."""
        if self.kind == "nan":
            return f"the loss is {self.loss}, the gradient norm {self.grad_norm}"
        return f"the loss is {self.loss:.4f}, {self.z:.1f} robust deviations above the usual {self.usual:.4f}"


class LossWatch:
    """Judges every step's loss; all ranks judge the same figures, so they agree.

    Args:
        settings: Policies and what counts as a spike.
        history: Losses of the steps before, oldest first, so that a resumed run judges as one that never stopped.
        skips: Updates left out in a row just before.
        half_precision: fp16, where an overflow of scaled gradients is the loss scale's business.
    """

    def __init__(
        self,
        settings: LossWatchSettings,
        *,
        history: Iterable[float] = (),
        skips: int = 0,
        half_precision: bool = False,
    ) -> None:
        self._settings = settings
        self._losses = deque(history, maxlen=settings.window)
        self._skips = skips
        self._half_precision = half_precision

    @property
    def decides_updates(self) -> bool:
        """Whether a policy leaves updates out, which makes the host wait for the loss before each."""
        return "skip" in {self._settings.nan, self._settings.spike}

    def judge(self, loss: float, grad_norm: float) -> Finding | None:
        """Return what is wrong with a step, None when nothing is."""
        if not isfinite(loss) or not (isfinite(grad_norm) or self._half_precision):
            return Finding(
                kind="nan", policy=self._settings.nan, loss=loss, grad_norm=grad_norm, usual=self._usual(), z=None
            )
        usual = self._usual()
        if usual is None:
            return None
        deviation = _MAD_TO_SIGMA * median(abs(known - usual) for known in self._losses)
        z = (loss - usual) / max(deviation, _LEAST_SCALE * abs(usual))
        if z <= self._settings.threshold:
            return None
        return Finding(kind="spike", policy=self._settings.spike, loss=loss, grad_norm=grad_norm, usual=usual, z=z)

    def accepts(self, loss: float, grad_norm: float) -> bool:
        """Tell whether a step's update may be made; changes nothing."""
        finding = self.judge(loss, grad_norm)
        return finding is None or finding.policy != "skip"

    def take(self, result: StepResult) -> Finding | None:
        """Take note of a step that is done; return what is wrong with it."""
        finding = self.judge(result.loss, result.grad_norm)
        skipped = finding is not None and finding.policy == "skip"
        self._skips = self._skips + 1 if skipped else 0
        if isfinite(result.loss) and not skipped:
            self._losses.append(result.loss)
        return finding

    def check(self, finding: Finding, step: int, positions: Sequence[int]) -> None:
        """End training where the policy says so.

        Args:
            finding: Of the step just done.
            step: 1-based.
            positions: First and last sample of the step, counted over the whole run from 0.

        Raises:
            LossFaultError: The same on all ranks.
        """
        where = f"step {step} (samples {positions[0]} to {positions[1]}): {finding.words}"
        if finding.policy == "stop":
            raise LossFaultError(
                where,
                hint="`hpjob resume` goes on from the newest checkpoint; with loss_watch."
                f"{finding.kind}: skip in recipe.yaml the update of such a step is left out",
            )
        if self._skips >= MOST_SKIPS:
            raise LossFaultError(
                f"{where}; the updates of {self._skips} steps in a row were left out",
                hint="lower optimizer.lr, or look at the data of these steps",
            )

    def _usual(self) -> float | None:
        return median(self._losses) if len(self._losses) >= LEAST_HISTORY else None


def as_fields(finding: Finding | None, result: StepResult) -> dict[str, Any]:
    """Return what a step's line in ``metrics.jsonl`` says about it beside the figures."""
    fields: dict[str, Any] = {} if finding is None else {"fault": finding.kind}
    if not result.updated:
        # Without a finding it was the loss scale that left the update out.
        fields["skipped"] = "overflow" if finding is None or finding.policy != "skip" else finding.kind
    return fields


def read_history(metrics: Path, window: int) -> tuple[list[float], int]:
    """Return the losses of the last accepted steps, and the number of steps skipped in a row at the end."""
    losses: list[float] = []
    skips = 0
    for line in read_json_lines(metrics):
        skipped = line.get("skipped") in {"nan", "spike"}
        skips = skips + 1 if skipped else 0
        loss = line.get("loss")
        if isinstance(loss, float) and isfinite(loss) and not skipped:
            losses.append(loss)
    return losses[-window:], skips
