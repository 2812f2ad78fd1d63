"""Which ranks the groups of every axis join, in the order of the runtime's mesh: ``pp, dp, sp, tp``, tp innermost.

Experts re-divide dp·sp, and the ranks of an ep group are neighbours there, whatever sp is.
"""

from __future__ import annotations

from typing import NamedTuple

from hpjob.plan.hardware import Hardware, Link
from hpjob.plan.layout import Layout


class Group(NamedTuple):
    """A group of ranks ``r, r + stride, …``."""

    size: int
    stride: int
    """From a member to the next."""


def tp_group(layout: Layout) -> Group:
    """Return the ranks that share every layer."""
    return Group(layout.tp, 1)


def sp_group(layout: Layout) -> Group:
    """Return the ranks that share a sequence on an axis of its own."""
    return Group(layout.sp, layout.tp)


def ep_group(layout: Layout) -> Group:
    """Return the ranks that hold different experts."""
    return Group(layout.ep, layout.tp)


def data_group(layout: Layout) -> Group:
    """Return the ranks that share the parameters beside tp."""
    return Group(layout.data_ranks, layout.tp)


def shard_group(layout: Layout) -> Group:
    """Return the ranks over which ZeRO shards."""
    return Group(layout.state_shards, layout.tp)


def copy_group(layout: Layout) -> Group:
    """Return the ranks that hold copies of a shard."""
    return Group(layout.data_ranks // layout.state_shards, layout.tp * layout.state_shards)


def expert_copies(layout: Layout) -> Group:
    """Return the ranks that hold the same experts."""
    return Group(layout.data_ranks // layout.ep, layout.tp * layout.ep)


def link_of(hardware: Hardware, layout: Layout, group: Group) -> Link:
    """Return the slowest link of any of these groups."""
    return hardware.link(group.size, group.stride, layout.world_size)


def stage_link(hardware: Hardware, layout: Layout) -> Link:
    """Return the link from the first pipeline stage to the next."""
    return hardware.link(2, layout.data_ranks * layout.tp)
