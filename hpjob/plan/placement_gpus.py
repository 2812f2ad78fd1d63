"""Which GPUs of a node are used, in which order, and what is unusual about a node."""

from __future__ import annotations

from dataclasses import dataclass

from hpjob.core import hostlist
from hpjob.plan.model import ParallelDegrees
from hpjob.plan.unlinked_pairs import keep_apart
from hpjob.topology.groups import disjoint_groups, largest_group_size, linked_pairs, usable_gpus
from hpjob.topology.model import Node

_OUT_OF_SERVICE = ("down", "drain", "drng", "fail", "maint", "unk", "no_respond", "not_responding")


@dataclass(frozen=True, slots=True)
class GpuOrder:
    """The GPUs of a node in the order of its ranks."""

    gpus: tuple[int, ...]
    remarks: tuple[str, ...]
    """What a person should know about the node, without its name."""


class GpuOrders:
    """Orders of GPUs, computed once for nodes that are alike.

    Args:
        degrees: Sizes of the axes.
        count: Ranks a node.
    """

    def __init__(self, degrees: ParallelDegrees, count: int) -> None:
        self._degrees, self._count = degrees, count
        self._known: dict[object, GpuOrder] = {}

    def of(self, node: Node) -> GpuOrder:
        """Return the order for one node."""
        key = signature(node)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = _order(node, self._count, self._degrees)
        return found


def signature(node: Node) -> tuple[object, ...]:
    """Return what decides the order of a node's GPUs; equal for nodes that are alike."""
    return (
        tuple((gpu.index, bool(gpu.mig), bool(gpu.display)) for gpu in node.gpus),
        None if node.islands is None else tuple((i.gpus, i.all_to_all, i.cliques) for i in node.islands),
        tuple((link.a, link.b) for link in node.links or () if link.linked is False),
        tuple((nic.rail, nic.near_gpus) for nic in node.nics or () if nic.rail is not None),
        node.state,
    )


def rails(node: Node) -> dict[int, int]:
    """Return the rail of every GPU that has exactly one nearest rail."""
    found: dict[int, set[int]] = {}
    for nic in node.nics or ():
        if nic.rail is not None:
            for gpu in nic.near_gpus or ():
                found.setdefault(gpu, set()).add(nic.rail)
    return {gpu: min(numbers) for gpu, numbers in found.items() if len(numbers) == 1}


def remarks(nodes: list[Node], orders: GpuOrders) -> tuple[str, ...]:
    """Say what is unusual about nodes; nodes that are alike share a line."""
    names: dict[str, list[str]] = {}
    for node in nodes:
        for text in orders.of(node).remarks:
            names.setdefault(text, []).append(node.name)
    return tuple(f"{_listed(members)}: {text}" for text, members in names.items())


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{hostlist.fold(names)} ({len(names)} nodes)"


def _order(node: Node, count: int, degrees: ParallelDegrees) -> GpuOrder:
    whole, said = _candidates(node, count)
    said = [*_state(node), *said]
    if len(whole) < count:
        # The machine has fewer GPUs than ranks a node: processes that share the host's cores.
        return GpuOrder(tuple(range(count)), tuple(said))
    pairs = linked_pairs(node)
    said += _fabric(node, whole)
    whole = _by_rail(node, _by_island(node, whole), count)
    sizes = [size for size in _inner_sizes(degrees, count) if size > 1]
    for size in sizes:
        groups = disjoint_groups(whole, size, count // size, pairs)
        if groups is not None:
            break
    else:
        size, groups = 1, None
    if len(whole) == count and (apart := keep_apart(whole, size, pairs)) is not None:
        groups = [apart]
    on_cores = all(gpu.model == "cpu" for gpu in node.gpus)
    if node.islands is not None and not on_cores and 1 < degrees.tp <= count and size < degrees.tp:
        said.append(
            f"no {count // degrees.tp} tp groups of {degrees.tp} GPUs in which all pairs are linked: "
            "part of the tp traffic goes through the host"
        )
    order = [gpu for group in groups or () for gpu in group]
    order += [gpu for gpu in whole if gpu not in order]
    return GpuOrder(tuple(order[:count]), tuple(said))


def lines_up(node: Node, count: int) -> bool:
    """Whether the order of a node's GPUs keeps those apart that lack a link: no neighbours on any axis, in no group."""
    gpus = [gpu.index for gpu in usable_gpus(node)]
    return len(gpus) == count and keep_apart(gpus, largest_group_size(node), linked_pairs(node)) is not None


def _inner_sizes(degrees: ParallelDegrees, count: int) -> list[int]:
    """Neighbouring ranks that should be linked, the widest wish first, never less than a tp group."""
    wishes = {degrees.tp * degrees.sp * degrees.ep, degrees.tp * degrees.ep, degrees.tp * degrees.sp, degrees.tp}
    fitting = {size for size in wishes if size <= count and count % size == 0}
    return sorted(fitting, reverse=True)


def _candidates(node: Node, count: int) -> tuple[list[int], list[str]]:
    """GPUs to choose from, and why others are left out."""
    usable = [gpu.index for gpu in usable_gpus(node)]
    said: list[str] = []
    needed = len(usable) < count <= len(node.gpus)
    for gpu in node.gpus:
        fate = f"but all {count} are needed" if needed else "left out"
        if gpu.display:
            said.append(f"GPU {gpu.index} is a display card, {fate}")
        elif gpu.mig:
            said.append(f"GPU {gpu.index} is sliced ({', '.join(gpu.mig)}), {fate}")
    return ([*usable, *(gpu.index for gpu in node.gpus if gpu.index not in usable)] if needed else usable), said


def _fabric(node: Node, gpus: list[int]) -> list[str]:
    """Name islands that are smaller than the node, and GPUs that have no link where others have some."""
    islands = [island for island in node.islands or () if len(island.gpus) > 1]
    if not islands:
        return []
    said = []
    for island in islands:
        if island.all_to_all is False:
            sets = " and ".join("-".join(map(str, clique)) for clique in island.cliques[:4]) or "not known"
            said.append(f"not every pair of GPUs {_indices(island.gpus)} is linked; all-to-all sets are {sets}")
    inside = {gpu for island in islands for gpu in island.gpus}
    if dead := [gpu for gpu in gpus if gpu not in inside]:
        said.append(f"GPU {_indices(dead)} has no link to the others of its node; kept out of their tp groups")
    if len(islands) > 1:
        said.append(f"{len(islands)} separate islands: {'; '.join(_indices(island.gpus) for island in islands)}")
    return said


def _state(node: Node) -> list[str]:
    state = (node.state or "").lower()
    return [f"Slurm calls the node {node.state}"] if any(word in state for word in _OUT_OF_SERVICE) else []


def _by_island(node: Node, gpus: list[int]) -> list[int]:
    """GPUs of large islands first; those without a link last."""
    order: list[int] = []
    for island in sorted(node.islands or (), key=lambda island: (-len(island.gpus), island.gpus)):
        order += [gpu for gpu in gpus if gpu in island.gpus and gpu not in order]
    return order + [gpu for gpu in gpus if gpu not in order]


def _by_rail(node: Node, gpus: list[int], count: int) -> list[int]:
    """Within one island the order of the rails, where each GPU has its own: equal places then share a rail."""
    known = rails(node)
    own = [known[gpu] for gpu in gpus if gpu in known]
    one_island = len(node.islands or ()) <= 1
    if not one_island or len(own) < len(gpus) or len(set(own)) < len(own) or len(gpus) > count:
        return gpus
    return sorted(gpus, key=lambda gpu: known[gpu])


def _indices(gpus: tuple[int, ...] | list[int]) -> str:
    return ",".join(str(gpu) for gpu in gpus)
