"""How a run goes on after Slurm has taken its nodes: queued again, or by a successor. Read from the site's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import psutil

from hpjob.slurm.lead import stop_s
from hpjob.slurm.model import JobSpec
from hpjob.slurm.site import Partition, Qos, Site, read_max_submitted, read_qos

# Ranks agree at the end of a step; slurmd gives at least this much between TERM and KILL.
LEAST_KILL_WAIT_S = 5
_LOCAL_FILE_SYSTEMS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "overlay"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Preemption:
    """What happens to a job when one of higher priority needs its nodes."""

    mode: Literal["never", "requeue", "cancel", "suspend"]
    window_s: int
    """Time from the first signal to the kill."""
    decided_by: str
    """Setting that says so, in words."""


def preemption(spec: JobSpec, site: Site, partition: Partition | None) -> Preemption:
    """Read what preemption means for a job."""
    kill_wait_s = max(site.kill_wait_s, LEAST_KILL_WAIT_S)
    if site.preempt_type in {"preempt/none", "(null)", ""}:
        return Preemption(mode="never", window_s=kill_wait_s, decided_by=f"PreemptType={site.preempt_type}")
    if "qos" in site.preempt_type:
        qos = _qos(spec, site) if site.accounting else None
        return _by_qos(qos, site, kill_wait_s)
    if partition is None:
        return Preemption(
            mode=_mode(site.preempt_mode), window_s=kill_wait_s, decided_by=f"PreemptMode={site.preempt_mode}"
        )
    mode = partition.preempt_mode or site.preempt_mode
    return Preemption(
        mode=_mode(mode),
        window_s=max(partition.grace_time_s, kill_wait_s),
        decided_by=f"partition {partition.name} has PreemptMode={mode}",
    )


def decide_chain(spec: JobSpec, site: Site, found: Preemption) -> tuple[bool, list[str]]:
    """Decide whether jobs of the run need successors.

    Returns:
        The decision, and what a person has to know.
    """
    notes: list[str] = []
    if found.mode == "cancel":
        most = _most_jobs(spec, site)
        if most == 1:
            notes.append(
                f"{found.decided_by}: a preempted job is cancelled, and your limit of 1 job (MaxSubmitJobs) leaves no "
                "place for a successor: the job tries to queue itself again in the time it has, else go on with "
                "`hpjob resume`"
            )
            return False, notes
        notes.append(
            f"{found.decided_by}: Slurm cancels preempted jobs here, so a successor waits in the queue for the end "
            "of each job and goes on"
        )
        return True, notes
    if found.mode == "requeue" and not site.job_requeue:
        notes.append("JobRequeue=0: the job asks for the right to be queued again by itself (--requeue)")
    return False, notes


def window_note(found: Preemption, *, step_s: float, save_s: float) -> str | None:
    """Return a sentence when a preempted job has less time than it needs to save."""
    needed_s = stop_s(step_s, save_s)
    if found.mode not in {"requeue", "cancel"} or needed_s <= found.window_s:
        return None
    return (
        f"a preempted job has {found.window_s} s to save here ({found.decided_by}) and may need {needed_s:.0f} s "
        f"(a step of {step_s:.0f} s, a save that has just begun, and its own, of {save_s:.0f} s each)"
    )


def shared_folder_note(spec: JobSpec) -> str | None:
    """Return a sentence when the run folder lies on a disk that other machines do not see."""
    if spec.nodes == 1:
        return None
    mounts = [disk for disk in psutil.disk_partitions(all=True) if _lies_in(spec.run_dir, disk.mountpoint)]
    mount = max(mounts, key=lambda disk: len(disk.mountpoint), default=None)
    if mount is None or mount.fstype not in _LOCAL_FILE_SYSTEMS:
        return None
    return (
        f"the run folder {spec.run_dir} lies on {mount.fstype}, a file system of this machine alone: unless all nodes "
        "see it at the same path, the job cannot start; choose shared storage with --run-dir"
    )


def _lies_in(path: str, mountpoint: str) -> bool:
    return path == mountpoint or path.startswith(mountpoint.rstrip("/") + "/")


def _by_qos(qos: Qos | None, site: Site, kill_wait_s: int) -> Preemption:
    if qos is None or qos.preempt_mode in {"", "CLUSTER"}:
        name = qos.name if qos is not None else "?"
        return Preemption(
            mode=_mode(site.preempt_mode),
            window_s=max(qos.grace_time_s if qos is not None else 0, kill_wait_s),
            decided_by=f"quality of service {name} follows the cluster's PreemptMode={site.preempt_mode}",
        )
    return Preemption(
        mode=_mode(qos.preempt_mode),
        window_s=max(qos.grace_time_s, kill_wait_s),
        decided_by=f"quality of service {qos.name} has PreemptMode={qos.preempt_mode}",
    )


def _mode(text: str) -> Literal["never", "requeue", "cancel", "suspend"]:
    words = {word.strip().upper() for word in text.split(",")}
    if "CANCEL" in words:
        return "cancel"
    if "REQUEUE" in words:
        return "requeue"
    return "suspend" if words & {"SUSPEND", "GANG"} else "never"


def _most_jobs(spec: JobSpec, site: Site) -> int | None:
    if not site.accounting:
        return None
    qos = _qos(spec, site)
    own = read_max_submitted(account=spec.account, cluster=site.cluster)
    limits = [limit for limit in (own, qos.max_submitted if qos is not None else None) if limit]
    return min(limits, default=None)


def _qos(spec: JobSpec, site: Site) -> Qos | None:
    return read_qos(spec.qos, account=spec.account, cluster=site.cluster)
