"""The nodes of a job as they see themselves, joined with what Slurm says of them. Never a reason to fail."""

from __future__ import annotations

import logging

from hpjob.core.environment import seconds_from_env
from hpjob.core.errors import HpjobError
from hpjob.topology.model import Node, Topology

logger = logging.getLogger("hpjob")
DETECT_TIMEOUT_S = 60.0
"""Bound on the step that asks all nodes; ``HPJOB_DETECT_TIMEOUT_S`` sets another, 0 leaves the step out."""


def seen_from_inside(slurm: Topology, ranks_per_node: int) -> Topology:
    """Add what the nodes of this job find in themselves (NVLink, NICs, rails) to what Slurm knows.

    Args:
        slurm: The job's nodes as Slurm describes them; its nodes and their order are kept. It counts all GPUs of
            a node, also those that belong to other jobs.
        ranks_per_node: GPUs that the plan needs on every node.

    Returns:
        ``slurm`` itself with a note when the nodes do not answer or contradict what Slurm has given.
    """
    timeout_s = seconds_from_env("HPJOB_DETECT_TIMEOUT_S", DETECT_TIMEOUT_S)
    if timeout_s <= 0:
        return slurm
    try:
        from hpjob.topology.detect.cluster import detect_allocation  # noqa: PLC0415

        found = detect_allocation(known=slurm, timeout_s=timeout_s)
        return _in_order(slurm, found, ranks_per_node)
    except HpjobError as error:
        reason = error.message
    except Exception as error:
        # Whatever a driver or a tool of the site does, the job can run on what Slurm knows.
        logger.debug("detection failed", exc_info=True)
        reason = repr(error)
    logger.warning("the nodes were not asked what is inside them: %s", reason)
    return _with_note(slurm, f"only what Slurm knows of the nodes: {reason}")


def _in_order(slurm: Topology, found: Topology, needed: int) -> Topology:
    by_name = {node.name: node for node in found.nodes}
    notes = list(found.notes)
    nodes = tuple(_node(node, by_name.get(node.name), needed, notes) for node in slurm.nodes)
    return found.model_copy(update={"nodes": nodes, "notes": tuple(dict.fromkeys(notes))})


def _node(known: Node, seen: Node | None, needed: int, notes: list[str]) -> Node:
    """Take a node as it sees itself, unless it sees fewer GPUs than the plan needs."""
    if seen is None:
        return known
    if len(seen.gpus) < min(needed, len(known.gpus)):
        notes.append(f"{known.name}: sees {len(seen.gpus)} GPUs, the plan needs {needed}; Slurm is believed")
        return known
    return seen


def _with_note(topology: Topology, note: str) -> Topology:
    return topology.model_copy(update={"notes": (*topology.notes, note)})
