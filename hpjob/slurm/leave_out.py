"""Leaves bad nodes out of a job, as long as enough others remain."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from hpjob.core.hostlist import expand, fold
from hpjob.core.run_dir import AttemptDir
from hpjob.core.run_records import read_json, write_text_atomically
from hpjob.slurm.bad_nodes import NodeMemory, Strike
from hpjob.slurm.commands import key_values, run_command
from hpjob.slurm.model import EXCLUDE, JobSpec
from hpjob.slurm.site import Site

logger = logging.getLogger("hpjob")
_NODELIST = "--nodelist="
_UNUSABLE = ("down", "drain", "fail", "maint", "unk", "power", "boot", "reboot", "inval", "planned*")


def leave_out_bad_nodes(
    spec: JobSpec, site: Site | None, memory: NodeMemory | None = None
) -> tuple[JobSpec, list[str]]:
    """Leave the site's bad nodes out of a job; return it with what a person has to know.

    Args:
        spec: The job; what an earlier submission left out is judged anew.
        site: None = there is no Slurm, and nothing to leave out.
        memory: None = that of the site's cluster.
    """
    spec = spec.model_copy(update={"left_out_nodes": ()})
    partition = site.partition(spec.partition) if site is not None else None
    if site is None or partition is None:
        return spec, []
    bad = (memory or NodeMemory(site.cluster)).bad()
    if not bad:
        return spec, []
    there = set(expand(partition.nodes))
    excluded, asked = _listed(spec, EXCLUDE), _listed(spec, _NODELIST)
    known = [node for node in bad if node in there and node not in excluded]
    notes = [f"{node} is asked for by name although it {_history(bad[node])}" for node in known if node in asked]
    wanted = [node for node in known if node not in asked]
    if not wanted:
        return spec, notes
    left = (usable_nodes(partition.name) or there) - set(wanted) - set(excluded)
    if len(left) < spec.nodes:
        return spec, [*notes, f"{fold(wanted)} failed lately, but without it too few nodes remain: not left out"]
    notes += [
        f"{node} is left out: it {_history(bad[node])}; `hpjob nodes forget {node}` takes it back" for node in wanted
    ]
    return spec.model_copy(update={"left_out_nodes": tuple(wanted)}), notes


def exclude_from_next_start(
    attempt: AttemptDir, nodes: Iterable[str], *, decision: str, successors: Sequence[str] = ()
) -> list[str]:
    """Have the next start of a run do without some nodes of this one.

    Slurm lets a job's list of excluded nodes be changed only while the job waits. So it is changed here for a job that
    waits already, and otherwise written into ``exclude`` of the attempt, which the job script hands to Slurm right
    after it has queued the job again.

    Args:
        attempt: The attempt that ended.
        nodes: To leave out.
        decision: What the job does next: ``requeue``, ``queued`` (it waits already) or ``chain``.
        successors: Jobs that wait for the end of this one.

    Returns:
        The nodes that will be left out; empty when none is, or too few would remain.
    """
    document = read_json(attempt.attempt_json) or {}
    job_id, count = str(document.get("job_id", "")), len(document.get("hostnames") or ())
    fields = key_values(run_command(["scontrol", "show", "job", "-o", job_id]).stdout)
    known = _names(fields, "ExcNodeList")
    wanted = [node for node in dict.fromkeys(nodes) if node not in known]
    if not wanted:
        return []
    if set(wanted) & set(_names(fields, "ReqNodeList")):
        logger.warning("%s failed, but the job asks for it by name: it stays", fold(wanted))
        return []
    there = usable_nodes(fields.get("Partition", ""))
    if there is None or len(there - set(known) - set(wanted)) < count:
        logger.warning("%s failed, but without it too few nodes remain for this job: it stays", fold(wanted))
        return []
    hosts = fold([*known, *wanted])
    if decision == "requeue":
        write_text_atomically(attempt.exclude, hosts + "\n")
        return wanted
    for waiting in successors if decision == "chain" else [job_id]:
        result = run_command(["scontrol", "update", f"JobId={waiting}", f"ExcNodeList={hosts}"])
        if not result.ok:
            logger.warning("%s cannot be left out of job %s: %s", hosts, waiting, result.complaint)
            return []
    return wanted


def usable_nodes(partition: str) -> set[str] | None:
    """Return the nodes of a partition that may get jobs; None when Slurm does not say."""
    if not partition:
        return None
    result = run_command(["sinfo", "-h", "-N", "-p", partition, "-o", "%N %T"])
    rows = [line.split() for line in result.stdout.splitlines()]
    if not result.ok or not all(len(row) == 2 for row in rows):
        return None
    return {name for name, state in rows if not state.lower().startswith(_UNUSABLE)} or None


def _names(fields: Mapping[str, str], name: str) -> list[str]:
    text = fields.get(name, "(null)")
    return [] if text in {"(null)", ""} else expand(text)


def _listed(spec: JobSpec, prefix: str) -> list[str]:
    options = [option for option in spec.extra_options if option.startswith(prefix)]
    return [node for option in options for node in expand(option.removeprefix(prefix))]


def _history(strikes: Sequence[Strike]) -> str:
    return f"failed {len(strikes)} times lately, last: {strikes[-1].what}"
