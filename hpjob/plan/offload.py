"""When the optimizer's states may lie in the host's memory, and what they take there."""

from __future__ import annotations

from hpjob.plan.memory import GIB
from hpjob.plan.problem import Problem

_HOST_BYTES = 16
"""Of a parameter whose shards lie in the host's memory: weight, gradient and two moments in fp32."""
_USABLE = 0.9
"""Part of a node's memory that a run may fill."""


def host_gib(problem: Problem, num_nodes: int) -> float:
    """Return what offloaded states take of each node: every parameter once over all ranks."""
    return _HOST_BYTES * problem.shape.num_params / num_nodes / GIB


def exceeds_host(problem: Problem, num_nodes: int) -> str | None:
    """Say that offloaded states do not fit into a node's own memory, where its size is known."""
    needed, known = host_gib(problem, num_nodes), problem.hardware.host_memory_gib
    if known is None or needed <= _USABLE * known:
        return None
    return f"offloading needs about {needed:,.0f} GiB of a node's own memory, {_USABLE * known:,.0f} are usable"


def why_no_offload(problem: Problem, num_nodes: int) -> str | None:
    """Say why plans with offloaded states are not looked for; None = they are."""
    s = problem.settings
    if s.cpu_offload is not False and problem.hardware.is_cpu:
        return "the ranks are on the host already"
    if s.cpu_offload != "auto":
        return f"parallel.cpu_offload={str(s.cpu_offload).lower()} is fixed"
    if s.zero_stage == 0:
        return "offloading needs ZeRO stage 1 or more, and zero_stage 0 is fixed"
    return exceeds_host(problem, num_nodes)
