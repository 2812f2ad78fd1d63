"""How fast the ranks of each group exchange data, compared among the groups of an axis."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from hpjob.plan.model import Axis
from hpjob.runtime.agreement import on_every_rank
from hpjob.runtime.mesh import Mesh

log = logging.getLogger(__name__)
_CPU_BYTES, _GPU_BYTES = 1 << 16, 1 << 26
_TIMED = 3
_SLOW = 3.0
"""A group whose rate is so many times below the usual one of its axis is reported."""
_BROKEN = 10.0
_ENOUGH_GROUPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRate:
    """One rank's measurement."""

    axis: str
    ranks: tuple[int, ...]
    gb_s: float


def measure(mesh: Mesh, device: torch.device) -> list[LinkRate]:
    """Time a small all-reduce in each group of this rank; a collective of all ranks.

    Returns:
        The rates of all ranks' groups, slowest member each, on every rank.
    """
    mine = [
        LinkRate(axis=axis.value, ranks=tuple(mesh.ranks(axis)), gb_s=_rate(mesh.group(axis), device))
        for axis in Axis
        if mesh.size(axis) > 1
    ]
    slowest: dict[tuple[str, tuple[int, ...]], LinkRate] = {}
    for rates in on_every_rank(lambda: mine):
        for rate in rates:
            known = slowest.get((rate.axis, rate.ranks))
            if known is None or rate.gb_s < known.gb_s:
                slowest[rate.axis, rate.ranks] = rate
    return list(slowest.values())


def usual_rates(rates: Sequence[LinkRate]) -> dict[str, float]:
    """Return the median rate of each axis in GB/s."""
    axes = dict.fromkeys(rate.axis for rate in rates)
    return {axis: median(rate.gb_s for rate in rates if rate.axis == axis) for axis in axes}


def slow_links(rates: Sequence[LinkRate], hosts: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Find groups that are much slower than the others of their axis.

    Args:
        rates: One a group.
        hosts: Node of every rank.

    Returns:
        Warnings, and nodes that alone can explain groups that hardly work, each with the finding.
    """
    usual = usual_rates(rates)
    warnings: list[str] = []
    suspects: dict[str, str] = {}
    for axis, rate in usual.items():
        groups = [found for found in rates if found.axis == axis]
        if len(groups) < _ENOUGH_GROUPS:
            continue
        for group in groups:
            if group.gb_s * _SLOW < rate:
                warnings.append(_words(group, rate, hosts))
        broken = [group for group in groups if group.gb_s * _BROKEN < rate]
        sound = {hosts[rank] for group in groups if group not in broken for rank in group.ranks}
        for group in broken:
            alone = {hosts[rank] for rank in group.ranks} - sound
            if len(alone) == 1:
                suspects.setdefault(alone.pop(), _words(group, rate, hosts))
    return warnings, suspects


def _words(group: LinkRate, usual: float, hosts: Sequence[str]) -> str:
    nodes = ", ".join(dict.fromkeys(hosts[rank] for rank in group.ranks))
    return (
        f"the {group.axis} group of ranks {group.ranks[0]} to {group.ranks[-1]} ({nodes}) exchanges "
        f"{group.gb_s:.3g} GB/s, others {usual:.3g}"
    )


def _rate(group: dist.ProcessGroup, device: torch.device) -> float:
    size = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    buffer = torch.zeros(size // 4, device=device)
    dist.all_reduce(buffer, group=group)  # connects the ranks
    _synchronise(device)
    started = time.perf_counter()
    for _ in range(_TIMED):
        dist.all_reduce(buffer, group=group)
    _synchronise(device)
    seconds = (time.perf_counter() - started) / _TIMED
    ranks = dist.get_world_size(group)
    return 2 * (ranks - 1) / ranks * size / max(seconds, 1e-9) / 1e9


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def as_event(rates: Sequence[LinkRate]) -> Mapping[str, object]:
    """Return what is worth keeping: usual and slowest rate of each axis in GB/s."""
    usual = usual_rates(rates)
    slowest = {axis: min(rate.gb_s for rate in rates if rate.axis == axis) for axis in usual}
    return {axis: {"usual_gb_s": round(usual[axis], 4), "slowest_gb_s": round(slowest[axis], 4)} for axis in usual}
