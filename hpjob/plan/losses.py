"""By what kind of time one layout loses against another, in words that name the links."""

from __future__ import annotations

from hpjob.plan.hardware import THROUGH_HOST, Hardware, Link
from hpjob.plan.layout import Layout
from hpjob.plan.mesh_order import Group, data_group, ep_group, sp_group, stage_links, tp_group
from hpjob.plan.search import Candidate

KINDS = ("compute", "bubble", "tp_comm", "pp_comm", "dp_comm", "optimizer")
_ISLANDS = {"nvlink": "NVLink", "xgmi": "XGMI", "pcie": "PCIe", "host": "the host's memory"}


def losses(best: Candidate, rival: Candidate) -> dict[str, float]:
    """Return seconds that the rival spends more, by kind."""
    return {kind: getattr(rival.time, kind) - getattr(best.time, kind) for kind in KINDS}


def main_loss(hardware: Hardware, best: Candidate, rival: Candidate) -> str:
    """Name the kind of time in which the rival loses most, and the link where it is traffic."""
    found = losses(best, rival)
    kind = max(KINDS, key=lambda name: found[name])
    a = rival.layout
    if kind == "tp_comm":
        group, what = _inner_group(best.layout, a)
        all_pairs = what == "expert" or (what == "sequence" and a.sequence_mode == "all_to_all")
        words = link_words(hardware, *group, a.world_size, all_pairs=all_pairs)
        return f"{found[kind]:+.3g} s {what} traffic over {words}"
    if kind == "dp_comm":
        return f"{found[kind]:+.3g} s dp traffic over {link_words(hardware, *data_group(a), a.world_size)}"
    if kind == "pp_comm":
        slowest = min(stage_links(hardware, a), key=lambda link: link.bandwidth)
        return f"{found[kind]:+.3g} s transfers between stages over {_named(hardware, slowest)} a {hardware.unit}"
    return f"{found[kind]:+.3g} s {kind}"


def _inner_group(best: Layout, rival: Layout) -> tuple[Group, str]:
    """The group inside layers that the rival spends more on, one that it has larger, and its name."""
    groups = (
        (tp_group(rival), "tp", best.tp),
        (sp_group(rival), "sequence", best.sp),
        (ep_group(rival), "expert", best.ep),
    )
    used = [entry for entry in groups if entry[0].size > 1] or [groups[0]]
    group, what, _ = next((entry for entry in used if entry[0].size > entry[2]), used[0])
    return group, what


def link_words(hardware: Hardware, size: int, stride: int, world: int | None = None, *, all_pairs: bool = False) -> str:
    """Name the slowest link of the groups of an axis with what one rank gets of it; see :meth:`Hardware.link`."""
    link = hardware.link(size, stride, world, all_pairs=all_pairs)
    inside = min(size, hardware.gpus_per_node // stride) if stride < hardware.gpus_per_node else 1
    # Of a ring that passes through several GPUs of a node, all of them share what leaves it.
    unit = hardware.unit
    each = f"for {inside} {unit}s of a node" if link.crosses_nodes and inside > 1 else f"a {unit}"
    return f"{_named(hardware, link)} {each}"


def _named(hardware: Hardware, link: Link) -> str:
    name = "the network" if link.crosses_nodes else _ISLANDS[hardware.island_kind]
    if not link.crosses_nodes and link.bandwidth < hardware.island_bandwidth * hardware.fit.island:
        name = "the host, as a pair may have no link,"
        if link.bandwidth > THROUGH_HOST:
            name = f"{_ISLANDS[hardware.island_kind]} and the host, as a pair has no link,"
    return f"{name} at {link.bandwidth / 1e9:.0f} GB/s"


def island_words(hardware: Hardware) -> str:
    """Say which GPUs reach each other how fast."""
    kind, size = _ISLANDS[hardware.island_kind], hardware.island_size
    if hardware.is_cpu:
        return f"all ranks of a node share {kind}"
    inside = f"{size} GPUs reach each other over {kind} at {hardware.island_bandwidth / 1e9:.0f} GB/s"
    if size > hardware.gpus_per_node:
        inside += f", across {size // hardware.gpus_per_node} nodes"
    elif size < hardware.gpus_per_node:
        inside += f", the {hardware.gpus_per_node} of a node are no such group"
    share = hardware.nic_bandwidth / hardware.gpus_per_node / 1e9
    return f"{inside}; the network has {share:.0f} GB/s a GPU"


def difference(best: Layout, other: Layout, without: str) -> str:
    """Name what else differs between two layouts, such as ``pp 4, zero 3``."""
    names = (
        ("tp", "tp"),
        ("pp", "pp"),
        ("ep", "ep"),
        ("zero", "zero"),
        ("microbatch", "microbatch"),
        ("style", "schedule"),
        ("recompute", "recompute"),
    )
    found = [
        f"{label} {getattr(other, field)}"
        for field, label in names
        if label != without and getattr(best, field) != getattr(other, field)
    ]
    if without != "sp" and (best.sp, best.sequence_mode) != (other.sp, other.sequence_mode):
        found.append(f"sp {other.sequence_mode or 'none'}" + (f" x{other.sp}" if other.sp > 1 else ""))
    return ", ".join(found)


def exceeds_words(needed_gib: float, limit_gib: float) -> str:
    """Return such as ``80.1 of 74.5 GiB``, with as many digits as tell the two apart."""
    digits = next((n for n in (1, 2, 3) if round(needed_gib, n) > round(limit_gib, n)), 4)
    return f"{needed_gib:.{digits}f} of {limit_gib:.{digits}f} GiB"
