"""States of the random generators, one set a rank, as tensors of the checkpoint."""

from __future__ import annotations

from collections.abc import Collection

import torch

_PREFIX = "random"


def random_state(rank: int) -> dict[str, torch.Tensor]:
    """Return the generator states of this rank under names that no other rank uses."""
    state = {f"{_PREFIX}.rank-{rank:05d}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"{_PREFIX}.rank-{rank:05d}.cuda"] = torch.cuda.get_rng_state()
    return state


def saved_random_state(rank: int, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return buffers for the states that a checkpoint has of this rank; none when its world was smaller."""
    return {name: buffer for name, buffer in random_state(rank).items() if name in names}


def restore_random_state(state: dict[str, torch.Tensor]) -> None:
    """Put loaded states into the generators."""
    for name, value in state.items():
        if name.endswith(".cuda"):
            torch.cuda.set_rng_state(value)
        else:
            torch.set_rng_state(value)
