"""How many layers the last stage gives away because the output head and the loss are its own."""

from __future__ import annotations

from functools import lru_cache
from math import fsum

from hpjob.plan.layout import relieved_split, stages_of_rank
from hpjob.recipe.model import PipelineStyle


@lru_cache(maxsize=4096)
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
    options = range(min(last - 1, round(head_in_layers) + 1) + 1)
    return min(options, key=lambda relief: (_busiest(num_layers, pp, chunks, style, head_in_layers, relief), relief))


def _busiest(num_layers: int, pp: int, chunks: int, style: PipelineStyle, head: float, relief: int) -> float:
    stages = [float(count) for count in relieved_split(num_layers, pp * chunks, relief)]
    stages[-1] += head
    return max(fsum(stages[stage] for stage in stages_of_rank(rank, pp, chunks, style)) for rank in range(pp))
