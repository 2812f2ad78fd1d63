"""The factor that keeps small fp16 gradients from vanishing, and when it changes."""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch

GROWTH_FACTOR = 2.0
BACKOFF_FACTOR = 0.5
GROWTH_INTERVAL = 1000
"""Updates in a row without an overflow after which the factor grows."""
SMALLEST, LARGEST = 1.0, 2.0**32
_SCALE, _GOOD = "optimizer.loss_scale", "optimizer.updates_since_overflow"


class LossScale:
    """Dynamic loss scale. Its decisions follow from the global gradient norm, so all ranks agree on them.

    Args:
        initial: First factor.
    """

    def __init__(self, initial: float) -> None:
        self.value = initial
        self._good_updates = 0

    def accepts(self, norm: float) -> bool:
        """Take note of one step's gradient norm; False = it overflowed and the update must be left out."""
        if isfinite(norm):
            self._good_updates += 1
            if self._good_updates == GROWTH_INTERVAL:
                self.value = min(self.value * GROWTH_FACTOR, LARGEST)
                self._good_updates = 0
            return True
        self.value = max(self.value * BACKOFF_FACTOR, SMALLEST)
        self._good_updates = 0
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return factor and counter under global names."""
        return {
            _SCALE: torch.tensor(self.value, dtype=torch.float64),
            _GOOD: torch.tensor(self._good_updates, dtype=torch.int64),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over factor and counter."""
        self.value = float(state[_SCALE])
        self._good_updates = int(state[_GOOD])
