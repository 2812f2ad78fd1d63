"""Checks before a job is queued: a wait in the queue is too long for a mistake that the site's own answers show."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpjob.core.errors import UserInputError
from hpjob.core.quantity import slurm_time
from hpjob.core.schema import nearest
from hpjob.slurm.model import JobSpec
from hpjob.slurm.site import Partition, Site, read_accounts

# The controller looks at time limits every 30 s and sends a signal up to this much early.
SIGNAL_EARLY_S = 60


def check_against_site(spec: JobSpec, site: Site, *, save_s: float) -> list[str]:
    """Check a job against what the site allows.

    Args:
        spec: The job.
        site: What the site says.
        save_s: How long a save is expected to take, seconds.

    Returns:
        Warnings: what will be different from what a person may expect.

    Raises:
        UserInputError: The site would refuse the job, never start it, or give it no time to save.
    """
    partition = find_partition(spec.partition, site)
    account_warnings = _check_account(spec, site, partition)
    if partition is not None:
        _check_size(spec, partition)
        _check_time_limit(spec, partition)
    check_save_window(spec, save_s=save_s, default_limit_s=partition.default_time_s if partition else None)
    return account_warnings


def check_save_window(spec: JobSpec, *, save_s: float, default_limit_s: int | None = None) -> None:
    """Refuse a time limit that leaves no time to train before the job has to save.

    Raises:
        UserInputError: The limit is not longer than the save window.
    """
    limit_s = spec.time_limit_s or default_limit_s
    window_s = spec.signal_lead_s + SIGNAL_EARLY_S + save_s
    if limit_s is not None and limit_s <= window_s:
        whose = "the time limit" if spec.time_limit_s else "the partition's default time limit"
        raise UserInputError(
            f"{whose} of {limit_s} s is not longer than the save window of {window_s:.0f} s: the job would be told to "
            "save before it has trained",
            hint=f"give at least --time {slurm_time(int(window_s) + 120)} (signal {spec.signal_lead_s} s before the "
            f"end, up to {SIGNAL_EARLY_S} s early, about {save_s:.0f} s to save)",
        )


def check_name(what: str, name: object) -> None:
    """Refuse what cannot be the name of a partition, an account or a QOS; None is none.

    Raises:
        UserInputError: It is empty or has spaces, quotes or signs that a script would read as something else.
    """
    if name is not None and not re.fullmatch(r"[^\s'\"\\#;$`&|<>()]+", str(name)):
        raise UserInputError(
            f"{what} {name!r} is no name that Slurm can have",
            hint=f"give the name alone, without spaces and quotes, such as --{what} {_name_alone(str(name))}",
        )


def _name_alone(text: str) -> str:
    return "".join(re.findall(r"[\w.,-]+", text)[:1]) or "NAME"


def find_partition(name: str | None, site: Site) -> Partition | None:
    """Return the partition that a job goes to, the default one for None; None when the site lists none.

    Raises:
        UserInputError: Unknown name, or no default.
    """
    partition = site.partition(name)
    names = [candidate.name for candidate in site.partitions]
    if partition is not None or not names:
        return partition
    if name is None:
        raise UserInputError(
            "the site has no default partition", hint=f"choose one with --partition: {', '.join(names)}"
        )
    guess = nearest(name, names)
    raise UserInputError(
        f"unknown partition {name!r}",
        hint=f"did you mean `{guess}`?" if guess else f"the partitions are {', '.join(names)}",
    )


def _check_account(spec: JobSpec, site: Site, partition: Partition | None) -> list[str]:
    if spec.account is None:
        return []
    if partition is not None and partition.allowed_accounts and spec.account not in partition.allowed_accounts:
        raise _wrong_account(spec.account, partition.allowed_accounts, f"partition {partition.name}")
    if not site.accounting:
        return [f"account {spec.account!r} cannot be checked: this site keeps no accounts, Slurm ignores the name"]
    accounts = read_accounts()
    if accounts is None:
        return [f"account {spec.account!r} cannot be checked: the site does not say which accounts are yours"]
    if spec.account not in accounts:
        raise _wrong_account(spec.account, accounts, "your user")
    return []


def _wrong_account(account: str, allowed: Sequence[str], whose: str) -> UserInputError:
    guess = nearest(account, allowed)
    return UserInputError(
        f"account {account!r} is not open to {whose}",
        hint=f"did you mean `{guess}`?" if guess else f"the accounts are {', '.join(allowed)}",
    )


def _check_size(spec: JobSpec, partition: Partition) -> None:
    most = min(partition.num_nodes, partition.max_nodes or partition.num_nodes)
    if spec.nodes > most:
        raise UserInputError(
            f"{spec.nodes} nodes asked, partition {partition.name} gives at most {most}",
            hint=f"use --nodes {most} or fewer, or another --partition (`sinfo -s`)",
        )
    gpus = partition.gpus_per_node
    if gpus is not None and spec.gpus_per_node > gpus:
        raise UserInputError(
            f"{spec.gpus_per_node} GPUs a node asked, the nodes of partition {partition.name} have {gpus}",
            hint=f"use `--set job.gpus_per_node={gpus}` or fewer, or another --partition"
            if gpus
            else "choose a partition with GPUs (`sinfo -o '%P %G'`)",
        )


def _check_time_limit(spec: JobSpec, partition: Partition) -> None:
    limit_s = partition.max_time_s
    if limit_s is not None and spec.time_limit_s is not None and spec.time_limit_s > limit_s:
        raise UserInputError(
            f"time limit {slurm_time(spec.time_limit_s)} is above the {slurm_time(limit_s)} of partition "
            f"{partition.name}",
            hint=f"use --time {slurm_time(limit_s)}; the job saves before the limit and queues itself again",
        )
