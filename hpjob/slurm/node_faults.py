"""What an attempt's end means for the nodes it had: remembered for the site, left out of the next start."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from hpjob.core.hostlist import fold
from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import read_json, read_outcome
from hpjob.slurm.bad_nodes import NodeMemory
from hpjob.slurm.blame import blamed_nodes, cause_beside_the_program, node_failure
from hpjob.slurm.commands import key_values, run_command
from hpjob.slurm.leave_out import exclude_from_next_start
from hpjob.slurm.srun_log import TaskEnd

logger = logging.getLogger("hpjob")


def note_node_faults(
    run: RunDir, attempt: AttemptDir, ends: Sequence[TaskEnd], *, decision: str, successors: Sequence[str] = ()
) -> list[str]:
    """Remember the nodes that failed in an attempt, and have its next start do without them.

    Args:
        run: The run.
        attempt: The attempt; all failure records are written.
        ends: How ranks ended, as the launcher saw it.
        decision: What the job does next.
        successors: Jobs that wait for the end of this one.

    Returns:
        The nodes that the next start will not get.
    """
    document = read_json(attempt.attempt_json) or {}
    outcome = read_outcome(attempt)
    if document.get("executor") != "slurm" or decision == "done":
        return []  # virtual nodes of one machine
    if outcome is not None and outcome.kind == "preempted" and cause_beside_the_program(attempt) is None:
        return []
    strikes = blamed_nodes(run, attempt, ends)
    if any(strike.kind == "killed" for strike in strikes) and _slurm_ends(str(document.get("job_id", ""))):
        return []
    if not strikes:
        return []
    memory = _memory(document)
    memory.add(strikes)
    for strike in strikes:
        logger.warning("node %s: %s: %s", strike.node, strike.kind, strike.what)
    if decision == "stop":
        return []
    bad = [strike.node for strike in strikes] + list(memory.bad())
    left_out = exclude_from_next_start(attempt, bad, decision=decision, successors=successors)
    if left_out:
        logger.info("the next start does without %s", fold(left_out))
    return left_out


def remember_lost_nodes(run: RunDir) -> list[str]:
    """Remember nodes of the newest attempt that are down now, when it left no word of its end: they took it along.

    Returns:
        Their names.
    """
    attempts = run.attempt_list()
    document = read_json(attempts[-1].attempt_json) if attempts else None
    if document is None or document.get("executor") != "slurm" or attempts[-1].end.exists():
        return []
    names = [str(name) for name in document.get("hostnames") or ()]
    result = run_command(["sinfo", "-h", "-N", "-n", ",".join(names), "-o", "%N %T"])
    rows = (line.split() for line in result.stdout.splitlines())
    lost = {row[0] for row in rows if len(row) == 2 and row[1].lower().startswith(("down", "fail"))}
    found = [name for name in names if name in lost]
    _memory(document).add([node_failure(run, attempts[-1], name, "down after its job was lost") for name in found])
    return found


def _memory(document: Mapping[str, Any]) -> NodeMemory:
    site = document.get("site")
    return NodeMemory(str(site.get("cluster") if isinstance(site, dict) else "cluster"))


def _slurm_ends(job_id: str) -> bool:
    """Whether Slurm itself takes the job's nodes, and with that kills its ranks."""
    fields = key_values(run_command(["scontrol", "show", "job", "-o", job_id]).stdout)
    return fields.get("JobState") != "RUNNING" or fields.get("PreemptTime", "None") not in {"None", "N/A"}
