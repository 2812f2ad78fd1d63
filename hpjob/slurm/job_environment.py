"""The Slurm job that this process is part of."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hpjob.core.errors import EnvironmentProblemError
from hpjob.core.hostlist import expand
from hpjob.slurm.commands import key_values, run_command


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmJob:
    """One start of a job."""

    job_id: str
    restart_count: int
    nodes: tuple[str, ...]
    partition: str | None


def current_job() -> SlurmJob:
    """Read the job from the variables that Slurm sets for a batch script.

    Raises:
        EnvironmentProblemError: This process is in no Slurm job.
    """
    job_id = os.environ.get("SLURM_JOB_ID")
    nodelist = os.environ.get("SLURM_JOB_NODELIST")
    if not job_id or not nodelist:
        raise EnvironmentProblemError(
            "this is no Slurm job: SLURM_JOB_ID and SLURM_JOB_NODELIST are not set",
            hint="start the script with `sbatch job.sbatch` or the run with `hpjob submit`",
        )
    return SlurmJob(
        job_id=job_id,
        restart_count=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        nodes=tuple(_expand(nodelist)),
        partition=os.environ.get("SLURM_JOB_PARTITION"),
    )


def node_addresses(names: tuple[str, ...]) -> dict[str, str]:
    """Return what Slurm calls the address of each node (an IP address or a name), in one call."""
    result = run_command(["scontrol", "show", "node", "-o", ",".join(names)])
    fields = [key_values(line) for line in result.stdout.splitlines()]
    return {node["NodeName"]: node["NodeAddr"] for node in fields if "NodeName" in node and "NodeAddr" in node}


def _expand(nodelist: str) -> list[str]:
    # Newer releases write forms that only their own scontrol expands.
    result = run_command(["scontrol", "show", "hostnames", nodelist])
    names = result.stdout.split()
    return names if result.ok and names else expand(nodelist)
