"""Where one rank runs, in one line, and which device that is for its process."""

from __future__ import annotations

from hpjob.plan.model import Plan, RankPlace


def planned_place(plan: Plan, rank: int) -> RankPlace:
    """Return the place of a rank; a plan need not list its places in rank order."""
    if rank < len(plan.placement) and plan.placement[rank].rank == rank:
        return plan.placement[rank]
    return next(place for place in plan.placement if place.rank == rank)


def placement_line(plan: Plan, rank: int, node: str) -> str:
    """Return such as ``rank 3 of 16 on n2 gpu 1: pp 0 dp 1 sp 0 tp 1``; the same for every launcher.

    Args:
        plan: The attempt's plan.
        rank: Of the process that says it.
        node: Where that process runs.
    """
    at = plan.degrees.coordinates(rank)
    where = " ".join(f"{axis.value} {index}" for axis, index in at.items())
    gpu = planned_place(plan, rank).gpu
    return f"rank {rank} of {plan.degrees.world_size} on {node} gpu {gpu}: {where}"


def device_index(plan: Plan, rank: int, visible: str | None, count: int) -> int | None:
    """Return the index of a rank's planned GPU among the devices that its process sees.

    Args:
        plan: The attempt's plan; its GPUs are numbered as the node numbers them.
        rank: Of the process.
        visible: ``CUDA_VISIBLE_DEVICES``.
        count: Devices that the process sees.

    Returns:
        None when the planned GPU is not among them.
    """
    place = planned_place(plan, rank)
    planned = {other.gpu for other in plan.placement if other.node == place.node}
    listed = [word.strip() for word in (visible or "").split(",")]
    if all(word.isdecimal() for word in listed) and planned <= {int(word) for word in listed}:
        index = [int(word) for word in listed].index(place.gpu)
    else:
        # Only some GPUs are visible and the process numbers them anew, or they are named by UUID.
        index = place.gpu
    return index if index < count else None
