"""State of a Slurm job in words, with or without an accounting database."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from hpjob.slurm.commands import CommandResult, run_command

JobPhase = Literal["waiting", "running", "ending", "finished", "stopped", "lost", "unknown"]

_PHASES: dict[str, tuple[JobPhase, str]] = {
    "PENDING": ("waiting", "waiting in the queue"),
    "CONFIGURING": ("waiting", "its nodes are being made ready"),
    "REQUEUED": ("waiting", "was queued again"),
    "REQUEUE_HOLD": ("waiting", "was queued again and is held"),
    "REQUEUE_FED": ("waiting", "was queued again"),
    "SPECIAL_EXIT": ("waiting", "is held after a special exit code"),
    "RESV_DEL_HOLD": ("waiting", "is held: its reservation is gone"),
    "RUNNING": ("running", "running"),
    "RESIZING": ("running", "running, about to change its size"),
    "SIGNALING": ("running", "running, a signal is on its way"),
    "STAGE_OUT": ("ending", "its files are being copied out"),
    "STOPPED": ("running", "stopped by a signal, its nodes are kept"),
    "SUSPENDED": ("running", "suspended, its nodes serve another job"),
    "COMPLETING": ("ending", "its last processes are ending"),
    "COMPLETED": ("finished", "ended by itself"),
    "CANCELLED": ("stopped", "cancelled"),
    "FAILED": ("stopped", "failed"),
    "TIMEOUT": ("stopped", "reached its time limit"),
    "NODE_FAIL": ("stopped", "lost a node"),
    "PREEMPTED": ("stopped", "preempted by a job of higher priority"),
    "BOOT_FAIL": ("stopped", "its nodes did not boot"),
    "LAUNCH_FAILED": ("stopped", "could not be launched"),
    "DEADLINE": ("stopped", "could not start before its deadline"),
    "OUT_OF_MEMORY": ("stopped", "ran out of memory"),
    "REVOKED": ("stopped", "was taken over by another cluster"),
}

_REASONS = {
    "None": "",
    "Resources": "its nodes are in use by other jobs",
    "Priority": "jobs of higher priority are before it",
    "BeginTime": "it may not start yet; a job that was queued again waits about two minutes on most sites",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": "the job it waits for cannot end as asked; cancel it",
    "JobHeldUser": "it is held by its user; `scontrol release` lets it go",
    "JobHeldAdmin": "it is held by an administrator",
    "JobHoldMaxRequeue": "Slurm queued it again too often and holds it; `scontrol release` lets it go",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows",
    "PartitionTimeLimit": "its time limit is above the partition's",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition takes no jobs now",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved",
    "NodeDown": "a node that it needs is down",
    "Reservation": "it waits for its reservation",
    "Licenses": "it waits for a licence",
    "InvalidAccount": "its account is not valid",
    "AccountNotAllowed": "its account may not use the partition",
    "InvalidQOS": "its quality of service is not valid",
    "QOSNotAllowed": "its quality of service may not use the partition",
    "BadConstraints": "no node fits what it asks for",
    "Cleaning": "its last start is still being cleaned up",
    "Prolog": "the nodes' prolog is running",
}
_REASON_PREFIXES = (
    ("ReqNodeNotAvail", _REASONS["ReqNodeNotAvail"]),
    ("Assoc", "a limit of its account is reached"),
    ("QOS", "a limit of its quality of service is reached"),
    ("MaxCpuPer", "a limit of its account is reached"),
    ("launch failed", "its launch failed and it is held; `scontrol release` tries again"),
    ("Nodes required", "nodes that it needs are down, drained or reserved"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """What Slurm knows about a job."""

    job_id: str
    phase: JobPhase
    state: str
    """Slurm's own word."""
    reason: str
    """Slurm's own word, empty when there is none."""
    words: str
    nodes: str = ""
    starts_at: str | None = None
    """When Slurm expects to start it, local time."""
    time_left: str | None = None

    @property
    def is_live(self) -> bool:
        """Whether the job runs, may still run, or still has processes."""
        return self.phase in {"waiting", "running", "ending", "unknown"}


def job_state(job_id: str) -> JobState:
    """Ask squeue, then sacct; a job that neither knows is ``lost``, silence is ``unknown``."""
    result = run_command(["squeue", "-h", "-t", "all", "-j", job_id, "-o", "%T|%r|%N|%S|%L"])
    if result.ok and result.stdout.strip():
        return _from_squeue(job_id, result.stdout.strip().splitlines()[0])
    if not result.ok and not _is_gone(result):
        return JobState(
            job_id=job_id, phase="unknown", state="?", reason="", words=f"Slurm does not answer: {result.complaint}"
        )
    return _from_sacct(job_id) or JobState(
        job_id=job_id, phase="lost", state="?", reason="", words="Slurm no longer knows the job"
    )


def wait_until_gone(job_id: str, timeout_s: float) -> bool:
    """Wait until no process of the job is left; return whether that came true in time."""
    end = time.monotonic() + timeout_s
    while job_state(job_id).is_live:
        if time.monotonic() > end:
            return False
        time.sleep(0.5)
    return True


def reason_words(reason: str) -> str:
    """Return Slurm's reason for not starting a job in words; an unknown one stays as it is."""
    plain = reason.strip("()")
    if plain in _REASONS:
        return _REASONS[plain]
    for prefix, words in _REASON_PREFIXES:
        if plain.startswith(prefix):
            return f"{words} ({plain})"
    return plain


def _from_squeue(job_id: str, line: str) -> JobState:
    state, reason, nodes, starts_at, time_left = [*line.split("|"), "", "", "", ""][:5]
    return _state(job_id, state, reason, nodes=nodes, starts_at=starts_at, time_left=time_left)


def _from_sacct(job_id: str) -> JobState | None:
    # Without a start time sacct looks no further back than midnight.
    fields = "State,Reason,NodeList"
    result = run_command(["sacct", "-n", "-X", "-P", "-j", job_id, "--starttime=1970-01-01", "-o", fields])
    line = result.stdout.strip().splitlines()[0] if result.ok and result.stdout.strip() else ""
    if not line:
        return None
    state, reason, nodes = [*line.split("|"), "", ""][:3]
    return _state(job_id, state, reason, nodes=nodes)


def _state(
    job_id: str, state: str, reason: str, *, nodes: str = "", starts_at: str = "", time_left: str = ""
) -> JobState:
    word = state.split(maxsplit=1)[0].rstrip("+") if state.split() else "?"
    phase, words = _PHASES.get(word, ("unknown", f"in Slurm's state {state}"))
    why = reason_words(reason)
    detail = f"{words}: {why}" if why and phase in {"waiting", "stopped"} else words
    return JobState(
        job_id=job_id,
        phase=phase,
        state=word,
        reason="" if reason in {"None", "(null)"} else reason,
        words=detail,
        nodes="" if nodes == "(null)" else nodes,
        starts_at=starts_at if phase == "waiting" and starts_at not in {"", "N/A"} else None,
        time_left=time_left if phase == "running" and time_left not in {"", "INVALID"} else None,
    )


def _is_gone(result: CommandResult) -> bool:
    return result.ok or "invalid job id" in result.stderr.lower()
