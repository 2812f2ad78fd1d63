"""What the checkpoint needs from the engine, and the entries that the loop adds to its state."""

from __future__ import annotations

from typing import Any, Protocol

import torch

STEP_KEY = "progress.step"


class SavedState(Protocol):
    """The engine as the checkpoint sees it."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors by flat global name; DTensors say how they are sharded."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state dict that was filled in place."""


def step_tensor(step: int) -> torch.Tensor:
    """Return the step as an entry of the state, a check on the manifest."""
    return torch.tensor(step, dtype=torch.int64)
