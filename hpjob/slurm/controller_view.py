"""What the controller says about a job that is just running or ending, as its own script needs it."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from hpjob.slurm.commands import CONTROLLER_PATIENCE_S, key_values, run_patiently
from hpjob.slurm.site import slurm_time_s

_NONE = frozenset({"", "None", "N/A", "Unknown"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerView:
    """One answer of ``scontrol show job``."""

    state: str
    restarts: int
    preempted: bool
    """Whether a job of higher priority takes its nodes; Slurm says so from the begin of the grace time on."""
    timed_out: bool
    may_be_requeued: bool
    exit_signal: int
    """Signal that ended the job's script, 0 = none."""

    @property
    def is_being_ended(self) -> bool:
        """Whether Slurm itself takes the nodes: preemption, time limit, requeue, cancel."""
        return self.state != "RUNNING" or self.preempted

    def queued_again(self, restart_count: int) -> bool:
        """Whether Slurm has queued the job again since the start with this count."""
        return self.restarts > restart_count or self.state in {"PENDING", "REQUEUED", "REQUEUE_HOLD"}

    def looks_cancelled(self, restart_count: int) -> bool:
        """Whether Slurm is ending this start of the job because someone cancelled it.

        While a job's processes end, Slurm shows only COMPLETING, not what it will be afterwards. A cancelled one is
        neither preempted, nor at its time limit, nor queued again (which counts its restarts up at once), nor has its
        script failed.
        """
        if self.state != "COMPLETING":
            return self.state == "CANCELLED"
        ended_otherwise = self.preempted or self.timed_out or self.exit_signal == signal.SIGKILL
        return not ended_otherwise and not self.queued_again(restart_count)


def ask_controller(job_id: str, *, patience_s: float = CONTROLLER_PATIENCE_S) -> ControllerView | None:
    """Ask about a job, again while the controller is away; None when it does not know the job or stays silent."""
    result = run_patiently(["scontrol", "show", "job", "-o", job_id], patience_s=patience_s)
    fields = key_values(result.stdout)
    if not result.ok or "JobState" not in fields:
        return None
    limit_s, run_s = slurm_time_s(fields.get("TimeLimit", "")), slurm_time_s(fields.get("RunTime", ""))
    _, _, number = fields.get("ExitCode", "0:0").partition(":")
    return ControllerView(
        state=fields["JobState"],
        restarts=int(fields.get("Restarts", "0")),
        preempted=fields.get("PreemptTime", "None") not in _NONE,
        timed_out=fields.get("Reason") == "TimeLimit"
        or (limit_s is not None and run_s is not None and run_s >= limit_s),
        may_be_requeued=fields.get("Requeue", "1") == "1",
        exit_signal=int(number) if number.isdigit() else 0,
    )
