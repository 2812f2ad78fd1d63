"""The job specification: what a job script is rendered from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hpjob.core.hostlist import expand, fold
from hpjob.core.schema import Persisted

EXCLUDE = "--exclude="
PositiveInt = Annotated[int, Field(gt=0)]


class JobSpec(Persisted):
    """Everything that the job script says, nothing that it computes at run time."""

    version: Literal[1] = 1
    job_name: str
    run_dir: str
    """Absolute path, the same on every node."""
    python: str
    """Interpreter that has hpjob installed, absolute path."""
    nodes: PositiveInt
    ranks_per_node: PositiveInt
    gpus_per_node: Annotated[int, Field(ge=0)]
    """GPUs asked from Slurm per node; 0 renders no GPU request."""
    cpus_per_rank: PositiveInt | None = None
    segment: PositiveInt | None = None
    """Nodes that have to lie in one block of Slurm's block topology; None = not asked."""
    time_limit_s: PositiveInt | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    signal: str = "USR2"
    signal_lead_s: PositiveInt = 120
    requeue: bool = True
    chain: bool = False
    """Whether a successor waits in the queue for the end of each job, because Slurm does not queue it again."""
    setup: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    extra_options: tuple[str, ...] = ()
    """Unknown sbatch options passed through after ``--``, each ``--long=value`` or ``--flag``."""
    left_out_nodes: tuple[str, ...] = ()
    """Nodes that failed lately, beside those that a person excludes."""

    @property
    def sbatch_options(self) -> tuple[str, ...]:
        """The options passed through, with one ``--exclude`` for all nodes that the job must not get."""
        if not self.left_out_nodes:
            return self.extra_options
        excluded = [option for option in self.extra_options if option.startswith(EXCLUDE)]
        nodes = [node for option in excluded for node in expand(option.removeprefix(EXCLUDE))]
        others = [option for option in self.extra_options if option not in excluded]
        return (*others, EXCLUDE + fold([*nodes, *self.left_out_nodes]))
