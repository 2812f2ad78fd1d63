"""Which old checkpoints may go once a newer one is known to be good."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpjob.recipe.model import CheckpointSettings
from hpjob.runtime.checkpoint.manifest import Kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """What is kept: the newest checkpoint, the last permanent ones, and those of round steps for good."""

    keep_last: int
    keep_every_steps: int | None = None

    @classmethod
    def of(cls, settings: CheckpointSettings) -> Retention:
        """Return what a recipe asks for."""
        return cls(keep_last=settings.keep_last, keep_every_steps=settings.keep_every_steps)

    def superfluous(self, kinds: Mapping[int, Kind], verified: int) -> list[int]:
        """Return the steps to delete, oldest first.

        Args:
            kinds: Kind of every complete checkpoint by step.
            verified: Step of the checkpoint that was just read back; it stays, and so does everything newer.
        """
        older = sorted(step for step in kinds if step < verified)
        permanent = [step for step in sorted(kinds) if kinds[step] == "permanent" and step <= verified]
        kept = set(permanent[-self.keep_last :])
        kept |= {step for step in permanent if self.keep_every_steps and step % self.keep_every_steps == 0}
        return [step for step in older if step not in kept]
