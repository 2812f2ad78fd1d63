"""What sbatch must not see of the environment in which a person types.

sbatch lets its ``SBATCH_*`` variables win over the directives of a script, and a job that is submitted
from inside another job inherits that job's ``SLURM_*``. hpjob has one rule: it takes both away
from sbatch, keeps what says which cluster to talk to, and names every ``SBATCH_*`` variable it took.
"""

from __future__ import annotations

from collections.abc import Mapping

_PREFIXES = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SUBMITIT_")
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"})


def variables_to_remove(environment: Mapping[str, str]) -> list[str]:
    """Return the names that sbatch is started without, sorted."""
    return sorted(name for name in environment if name.startswith(_PREFIXES) and name not in _KEPT)


def override_warnings(environment: Mapping[str, str]) -> list[str]:
    """Return one sentence for each ``SBATCH_*`` variable that would have overridden the job script."""
    return [
        f"{name}={environment[name]} is set and would override the job script; "
        "hpjob starts sbatch without it, say it as an option of `hpjob submit` if you want it"
        for name in variables_to_remove(environment)
        if name.startswith("SBATCH_")
    ]


def cleaned(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` without the variables of :func:`variables_to_remove`."""
    removed = set(variables_to_remove(environment))
    return {name: value for name, value in environment.items() if name not in removed}
