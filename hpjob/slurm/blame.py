"""Which nodes an attempt's end points to; never those of a preemption or of a mistake in the person's own code."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import Failure, first_failure, read_failures
from hpjob.slurm.bad_nodes import Strike
from hpjob.slurm.srun_log import TaskEnd

DEADLOCK = "Deadlock"
"""Name of a hang in which all ranks wait for each other."""
_USERS_OWN = ("Out Of Memory", "oom-kill")


def blamed_nodes(run: RunDir, attempt: AttemptDir, ends: Sequence[TaskEnd]) -> list[Strike]:
    """Return a strike for each node that failed; none where what happened is not the matter of one node.

    Args:
        run: The run.
        attempt: One that ended with a failure, not because Slurm took its nodes.
        ends: How ranks ended, as the launcher saw it.
    """
    lost = [end.node for end in ends if not end.ranks]
    if lost:
        return [node_failure(run, attempt, node, "Slurm reported a node failure") for node in dict.fromkeys(lost)]
    failures = [failure for failure in read_failures(attempt) if points_to_node(failure)]
    unfit = [failure for failure in failures if failure.kind == "preflight"]
    nodes = dict.fromkeys(failure.node for failure in unfit or failures)
    # The same trouble on several nodes at once is in the program or in what they share.
    if not nodes or (len(nodes) > 1 and not unfit):
        return []
    first = {failure.node: failure for failure in reversed(unfit or failures)}
    return [_strike(run, attempt, node, first[node].kind, first[node].message) for node in nodes]


def node_failure(run: RunDir, attempt: AttemptDir, node: str, what: str) -> Strike:
    """Return the strike of a node that Slurm lost."""
    return _strike(run, attempt, node, "node-failure", what)


def points_to_node(failure: Failure) -> bool:
    """Return whether a failure may be its node's."""
    if failure.kind == "killed":
        return not any(words in failure.message for words in _USERS_OWN)
    return failure.kind == "preflight" or (failure.kind == "hang" and failure.exception != DEADLOCK)


def _strike(run: RunDir, attempt: AttemptDir, node: str, kind: str, what: str) -> Strike:
    line = what.strip().splitlines()[0][:300] if what.strip() else kind
    return Strike(node=node, time=time.time(), kind=kind, run=str(run.path), attempt=attempt.index, what=line)


def cause_beside_the_program(attempt: AttemptDir) -> str | None:
    """Return what ended an attempt in words when it is worth another try on other nodes: a hang, an unfit node."""
    first = first_failure(read_failures(attempt))
    if first is None or first.kind not in {"hang", "preflight"}:
        return None
    return first.message.splitlines()[0] if first.message else f"rank {first.rank} on {first.node}: {first.kind}"
