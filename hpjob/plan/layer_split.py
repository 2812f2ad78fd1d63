"""How many layers the last stage gives away because the output head and the loss are its own."""

from __future__ import annotations

from functools import lru_cache

from hpjob.plan.layout import relieved_split, stages_of_rank
from hpjob.recipe.model import PipelineStyle


def best_relief(num_layers: int, pp: int, chunks: int, style: PipelineStyle, head_in_layers: float) -> int:
    """Return the relief that makes the busiest pipeline rank least busy; of equals the smallest.

    Args:
        num_layers: Decoder layers of the model.
        pp: Pipeline ranks.
        chunks: Stages a rank holds.
        style: Which stages a rank holds.
        head_in_layers: Time of head and loss, in times of a layer.
    """
    if pp == 1:
        return 0
    last = relieved_split(num_layers, pp * chunks, 0)[-1]
    best, least = 0, float("inf")
    for relief in range(min(last - 1, round(head_in_layers) + 1) + 1):
        others, with_head = _loads(num_layers, pp, chunks, style, relief)
        busiest = max(others, with_head + head_in_layers)
        if busiest < least:
            best, least = relief, busiest
    return best


@lru_cache(maxsize=4096)
def _loads(num_layers: int, pp: int, chunks: int, style: PipelineStyle, relief: int) -> tuple[int, int]:
    """Most layers of the pipeline ranks without the head, and layers of the one that has it."""
    stages = relieved_split(num_layers, pp * chunks, relief)
    held = [stages_of_rank(rank, pp, chunks, style) for rank in range(pp)]
    layers = [sum(stages[stage] for stage in of_rank) for of_rank in held]
    with_head = next(rank for rank, of_rank in enumerate(held) if len(stages) - 1 in of_rank)
    return max(count for rank, count in enumerate(layers) if rank != with_head), layers[with_head]
