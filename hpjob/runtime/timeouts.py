"""How long ranks wait for each other. Needs no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

SETUP_TIMEOUT_S = 1800.0
"""For set-up and saves: ranks may be far apart on a slow file system."""
STEP_TIMEOUT_S = 600.0
"""From the second step on a collective that takes longer than this is a hang."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Bounds on waiting for other ranks."""

    setup_s: float = SETUP_TIMEOUT_S
    step_s: float = STEP_TIMEOUT_S

    @classmethod
    def from_env(cls) -> Timeouts:
        """Read ``HPJOB_SETUP_TIMEOUT_S`` and ``HPJOB_STEP_TIMEOUT_S``."""
        return cls(
            setup_s=float(os.environ.get("HPJOB_SETUP_TIMEOUT_S", SETUP_TIMEOUT_S)),
            step_s=float(os.environ.get("HPJOB_STEP_TIMEOUT_S", STEP_TIMEOUT_S)),
        )
