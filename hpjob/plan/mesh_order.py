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


def exchange_link(hardware: Hardware, layout: Layout, group: Group) -> Link:
    """Return the slowest link of any of these groups when every member sends to every other one."""
    return hardware.link(group.size, group.stride, layout.world_size, all_pairs=True)


def stage_links(hardware: Hardware, layout: Layout) -> list[Link]:
    """Return the slowest link from every pipeline rank to the next, and from the last back to the first."""
    stage = layout.data_ranks * layout.tp
    return [hardware.hop(rank * stage, stage, (rank + 1) % layout.pp * stage) for rank in range(layout.pp)]
