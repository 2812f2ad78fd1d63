"""Across the nodes of an allocation (one step through Slurm), or from a login node (what Slurm knows)."""

from __future__ import annotations

import os
import subprocess
import sys

from pydantic import ValidationError

from hpjob.core.errors import EnvironmentProblemError
from hpjob.topology.detect.commands import SLURM_TOOLS, ask
from hpjob.topology.detect.node_report import PREFIX
from hpjob.topology.merge import merge
from hpjob.topology.model import Switch, Topology

STEP_TIMEOUT_S = 120


def in_allocation() -> bool:
    """Whether this process runs inside a Slurm job."""
    return "SLURM_JOB_ID" in os.environ and "SLURM_JOB_NUM_NODES" in os.environ


def detect_login() -> Topology:
    """What Slurm knows of all its nodes: GPUs by count, states, switches or blocks.

    Raises:
        EnvironmentProblemError: No Slurm answers.
    """
    parts: list[Topology] = []
    reasons: list[str] = []
    for tool in SLURM_TOOLS:
        found, reason = ask(tool)
        if found is not None:
            parts.append(found)
        elif reason:
            reasons.append(reason)
    if not parts:
        raise EnvironmentProblemError(
            f"no Slurm here: {'; '.join(reasons)}", hint="run `hpjob topology detect --node` for this host alone"
        )
    merged = merge(parts)
    note = "what is inside the nodes (NVLink, NICs) is only seen on them: run this inside a job"
    return merged.model_copy(update={"notes": (*reasons, *merged.notes, note)})


def detect_allocation() -> Topology:
    """Run the node detector once on every node of the job and join the answers with what Slurm knows.

    Raises:
        EnvironmentProblemError: The step failed on every node.
    """
    count = os.environ["SLURM_JOB_NUM_NODES"]
    # --overlap lets the step run beside the one that asks; all GPUs of the node stay visible to it.
    command = (
        "srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--overlap", "--kill-on-bad-exit=0",
        sys.executable, "-m", "hpjob.topology.detect.node_report",
    )  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentProblemError(f"the step over the nodes failed: {error}", hint="try `srun hostname`") from None
    reports, refused = parse_reports(done.stdout)
    if not reports:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise EnvironmentProblemError(
            f"no node answered: {lines[-1][:200]}", hint="is hpjob installed at the same path on the nodes?"
        )
    return _joined(reports, int(count), refused)


def parse_reports(text: str) -> tuple[list[Topology], int]:
    """Return the nodes' answers and how many lines could not be read."""
    reports: list[Topology] = []
    refused = 0
    for line in text.splitlines():
        _, marker, document = line.partition(PREFIX)
        if not marker:
            continue
        try:
            reports.append(Topology.model_validate_json(document))
        except ValidationError:
            refused += 1
    return reports, refused


def _joined(reports: list[Topology], count: int, refused: int) -> Topology:
    notes = [f"{count - len(reports)} of {count} nodes did not answer"] if len(reports) < count else []
    notes += [f"{refused} answers could not be read"] if refused else []
    places = join_addresses([switch for report in reports for switch in report.switches or ()])
    nodes = sorted((node for report in reports for node in report.nodes), key=lambda node: node.name)
    names = {node.name for node in nodes}
    slurm = [found for tool in SLURM_TOOLS if (found := ask(tool)[0]) is not None]
    inside = Topology(
        nodes=tuple(nodes),
        switches=places or None,
        source="nodes of the job",
        notes=tuple(f"{report.nodes[0].name}: {note}" for report in reports for note in report.notes),
        sources={fact: source for report in reports for fact, source in report.sources.items()},
    )
    merged = merge([inside, *slurm]) if slurm else inside
    kept = tuple(node for node in merged.nodes if node.name in names)
    return merged.model_copy(update={"nodes": kept, "notes": (*notes, *merged.notes)})


def join_addresses(switches: list[Switch]) -> tuple[Switch, ...]:
    """Join the paths that each node has to the top into one tree."""
    found: dict[str, Switch] = {}
    for switch in switches:
        known = found.get(switch.name)
        found[switch.name] = switch.model_copy(
            update={
                "nodes": tuple(dict.fromkeys((*(known.nodes if known else ()), *switch.nodes))),
                "switches": tuple(dict.fromkeys((*(known.switches if known else ()), *switch.switches))),
            }
        )
    return tuple(found.values())
