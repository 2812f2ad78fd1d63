"""What the site says about itself: settings of the controller, partitions, nodes, accounts."""

from __future__ import annotations

import getpass
import os
import re
from dataclasses import dataclass

from hpjob.core.errors import EnvironmentProblemError
from hpjob.slurm.commands import NOT_FOUND, key_values, run_command

_UNLIMITED = frozenset({"UNLIMITED", "INFINITE", "NONE", "N/A", ""})
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_GPU_GRES = re.compile(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)")
_UNCONFIGURED = re.compile(r"configuration source|s_p_parse_file|fetch_config|no such file", re.IGNORECASE)


class NoSlurmError(EnvironmentProblemError):
    """This machine belongs to no Slurm cluster, unlike one whose controller is just silent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Qos:
    """One quality of service; None = no limit or not said."""

    name: str
    preempt_mode: str
    """Empty or ``cluster`` = the cluster's."""
    grace_time_s: int
    max_submitted: int | None
    """Most jobs of one person that may wait or run at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """One partition; None = no limit or not said."""

    name: str
    is_default: bool
    num_nodes: int
    nodes: str
    """Host list."""
    state: str
    max_nodes: int | None
    max_time_s: int | None
    default_time_s: int | None
    grace_time_s: int
    preempt_mode: str
    """Such as ``REQUEUE``, ``CANCEL``, ``OFF``."""
    allowed_accounts: tuple[str, ...] | None
    gpus_per_node: int | None
    """Most GPUs that one of its nodes has; None = not seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Settings that decide what happens to a job."""

    cluster: str
    version: str
    kill_wait_s: int
    preempt_type: str
    preempt_mode: str
    job_requeue: bool
    requeue_delay_s: int
    """How long a job that was queued again waits at least."""
    proctrack_type: str
    accounting: bool
    sends_user_signal: bool
    """Whether preemption sends the signal of ``--signal`` instead of TERM."""
    partitions: tuple[Partition, ...] = ()

    def partition(self, name: str | None) -> Partition | None:
        """Return the partition of that name, the default one for None."""
        for partition in self.partitions:
            if partition.name == name or (name is None and partition.is_default):
                return partition
        return None

    def facts(self) -> dict[str, object]:
        """Return what is worth keeping with an attempt."""
        return {
            "slurm_version": self.version,
            "cluster": self.cluster,
            "kill_wait_s": self.kill_wait_s,
            "preempt_type": self.preempt_type,
            "preempt_mode": self.preempt_mode,
            "requeue_delay_s": self.requeue_delay_s,
            "proctrack_type": self.proctrack_type,
            "sends_user_signal": self.sends_user_signal,
        }


def read_site() -> Site:
    """Ask the controller for its settings and partitions.

    Raises:
        NoSlurmError: There is no Slurm here.
        EnvironmentProblemError: No controller answers in time.
    """
    result = run_command(["scontrol", "show", "config"])
    if result.returncode == NOT_FOUND:
        raise NoSlurmError(
            "Slurm's commands are not on PATH", hint="load your site's Slurm module, or run here with --executor local"
        )
    config = _read_config(result.stdout)
    if not result.ok and "SLURM_CONF" not in os.environ and _UNCONFIGURED.search(result.stdout + result.stderr):
        raise NoSlurmError(
            "Slurm's commands are here, but no cluster is configured for them",
            hint="SLURM_CONF names a cluster's configuration; --executor local runs without Slurm",
        )
    if not result.ok or "SLURM_VERSION" not in config:
        raise EnvironmentProblemError(
            f"no Slurm controller answers: {result.complaint}",
            hint="`scontrol ping` shows its state; SLURM_CONF names a cluster; --executor local runs without Slurm",
        )
    return _site(config, _read_partitions())


def read_accounts() -> tuple[str, ...] | None:
    """Return the accounts that this person may use; None when the site does not say."""
    user = os.environ.get("USER") or getpass.getuser()
    result = run_command(["sacctmgr", "-n", "-P", "show", "assoc", f"user={user}", "format=Account"])
    names = tuple(dict.fromkeys(line.strip() for line in result.stdout.splitlines() if line.strip()))
    return names if result.ok and names else None


def read_qos(name: str | None, *, account: str | None, cluster: str) -> Qos | None:
    """Return a quality of service; None when the site does not say.

    Args:
        name: Of the job; None = the default of the account that the job is charged to.
        account: That account; None = the person's default one.
        cluster: Name of this cluster; the accounting may serve several.
    """
    if name is None:
        names = _of_account("DefaultQOS", account, cluster)
        name = names[0] if names else "normal"
    fields = "Name,PreemptMode,GraceTime,MaxSubmitJobsPerUser"
    result = run_command(["sacctmgr", "-n", "-P", "show", "qos", f"name={name}", f"format={fields}"])
    rows = [line.split("|") for line in result.stdout.splitlines()] if result.ok else []
    row = next((row for row in rows if len(row) == 4 and row[0] == name), None)
    if row is None:
        return None
    return Qos(
        name=name,
        preempt_mode=row[1].upper(),
        grace_time_s=slurm_time_s(row[2]) or 0,
        max_submitted=int(row[3]) if row[3].isdigit() else None,
    )


def read_max_submitted(*, account: str | None, cluster: str) -> int | None:
    """Return how many jobs this person may have in an account at once; None = no limit, or not said."""
    numbers = [int(line) for line in _of_account("MaxSubmitJobs", account, cluster) if line.isdigit()]
    return min(numbers, default=None)


def _of_account(field: str, account: str | None, cluster: str) -> list[str]:
    """Ask for a setting of one account of this person, for None of the default one; the others have their own."""
    user = os.environ.get("USER") or getpass.getuser()
    which = f"account={account}" if account else "onlydefaults"
    words = ["show", "assoc", f"user={user}", f"cluster={cluster}", which, f"format={field}"]
    result = run_command(["sacctmgr", "-n", "-P", *words])
    return [line.strip() for line in result.stdout.splitlines() if line.strip()] if result.ok else []


def slurm_time_s(text: str) -> int | None:
    """Read a time limit as Slurm prints it (``D-HH:MM:SS``, ``HH:MM:SS``, minutes); None = unlimited."""
    if text.strip().upper() in _UNLIMITED:
        return None
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _read_config(text: str) -> dict[str, str]:
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def _site(config: dict[str, str], partitions: tuple[Partition, ...]) -> Site:
    user_signal = config.get("SlurmctldParameters", "") + config.get("PreemptParameters", "")
    cred_expire = re.search(r"cred_expire=(\d+)", config.get("AuthInfo", ""))
    return Site(
        cluster=config.get("ClusterName", "?"),
        version=config["SLURM_VERSION"],
        kill_wait_s=_seconds(config.get("KillWait"), 30),
        preempt_type=config.get("PreemptType", "preempt/none"),
        preempt_mode=config.get("PreemptMode", "OFF"),
        job_requeue=config.get("JobRequeue", "1") == "1",
        # The controller lets a job's old credential expire before it may start again.
        requeue_delay_s=(int(cred_expire[1]) if cred_expire else 120) + 1,
        proctrack_type=config.get("ProctrackType", "?"),
        accounting="slurmdbd" in config.get("AccountingStorageType", ""),
        sends_user_signal="send_user_signal" in user_signal,
        partitions=partitions,
    )


def _read_partitions() -> tuple[Partition, ...]:
    result = run_command(["scontrol", "show", "partition", "-o"])
    gpus = _gpus_by_partition()
    return tuple(
        _partition(fields, gpus.get(fields["PartitionName"]))
        for fields in map(key_values, result.stdout.splitlines())
        if "PartitionName" in fields
    )


def _partition(fields: dict[str, str], gpus_per_node: int | None) -> Partition:
    accounts = fields.get("AllowAccounts", "ALL")
    max_nodes = fields.get("MaxNodes", "UNLIMITED")
    return Partition(
        name=fields["PartitionName"],
        is_default=fields.get("Default") == "YES",
        num_nodes=int(fields.get("TotalNodes", "0")),
        nodes=fields.get("Nodes", ""),
        state=fields.get("State", "UP"),
        max_nodes=int(max_nodes) if max_nodes.isdigit() else None,
        max_time_s=slurm_time_s(fields.get("MaxTime", "")),
        default_time_s=slurm_time_s(fields.get("DefaultTime", "")),
        grace_time_s=_seconds(fields.get("GraceTime"), 0),
        preempt_mode=fields.get("PreemptMode", "OFF"),
        allowed_accounts=None if accounts == "ALL" else tuple(accounts.split(",")),
        gpus_per_node=gpus_per_node,
    )


def _gpus_by_partition() -> dict[str, int]:
    found: dict[str, int] = {}
    result = run_command(["sinfo", "-h", "-o", "%R|%G"])
    for line in result.stdout.splitlines():
        name, _, gres = line.partition("|")
        count = sum(int(number) for number in _GPU_GRES.findall(gres))
        found[name.strip()] = max(found.get(name.strip(), 0), count)
    return found


def _seconds(text: str | None, default: int) -> int:
    match = re.match(r"\d+", text or "")
    return int(match[0]) if match else default
