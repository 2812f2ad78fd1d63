"""Who this process is: rank, world, node, run folder. Needs no torch, so mistakes show in a second."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpjob.core.errors import EnvironmentProblemError, UserInputError
from hpjob.core.run_dir import AttemptDir, RunDir

_STARTED_BY = "ranks are started by the job script or by `hpjob submit`; by hand set HPJOB_RANK"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One process of an attempt."""

    rank: int
    local_rank: int
    hosts: tuple[str, ...]
    """Host of every rank."""
    node: str
    """Where this process runs, by the name that the launcher uses."""
    master_addr: str
    run_dir: RunDir
    attempt: AttemptDir

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    @property
    def ranks_on_node(self) -> int:
        return self.hosts.count(self.node)

    def check_host(self) -> None:
        """Compare the node this process is on with the host file.

        Raises:
            EnvironmentProblemError: The launcher placed this rank elsewhere, so the plan would not hold.
        """
        planned = self.hosts[self.rank]
        if _short(planned) != _short(self.node):
            raise EnvironmentProblemError(
                f"rank {self.rank} runs on {self.node}, but {self.attempt.hosts} puts it on {planned}",
                hint="start the ranks with `srun --distribution=arbitrary` and SLURM_HOSTFILE set to that file",
            )


def find_rank(env: Mapping[str, str], run_dir: Path, attempt_dir: Path) -> Rank:
    """Read rank and node from the launcher's variables and the world from the host file.

    Args:
        env: ``HPJOB_RANK``, ``HPJOB_LOCAL_RANK``, ``HPJOB_NODE_NAME``, else Slurm's ``SLURM_PROCID``,
            ``SLURM_LOCALID``, ``SLURMD_NODENAME``.
        run_dir: Folder of the run.
        attempt_dir: Folder of this attempt.

    Raises:
        UserInputError: A variable or file is missing or wrong.
    """
    attempt = AttemptDir(attempt_dir)
    try:
        hosts = tuple(attempt.hosts.read_text(encoding="utf-8").split())
        document = json.loads(attempt.attempt_json.read_text(encoding="utf-8"))
        master_addr = str(document["master_addr"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserInputError(
            f"attempt folder {attempt_dir} cannot be read: {error!r}",
            hint="it is made by `python -m hpjob.slurm.attempt begin`",
        ) from None
    rank = _number(env, "HPJOB_RANK", "SLURM_PROCID")
    if rank >= len(hosts):
        raise UserInputError(
            f"this is rank {rank}, but {attempt.hosts} names {len(hosts)} ranks",
            hint="start as many ranks as the host file has lines",
        )
    node = env.get("HPJOB_NODE_NAME") or env.get("SLURMD_NODENAME")
    if not node:
        raise UserInputError("neither HPJOB_NODE_NAME nor SLURMD_NODENAME is set", hint=_STARTED_BY)
    return Rank(
        rank=rank,
        local_rank=_number(env, "HPJOB_LOCAL_RANK", "SLURM_LOCALID"),
        hosts=hosts,
        node=node,
        master_addr=master_addr,
        run_dir=RunDir(run_dir),
        attempt=attempt,
    )


def _number(env: Mapping[str, str], *names: str) -> int:
    for name in names:
        value = env.get(name)
        if value is None:
            continue
        if not value.isdecimal():
            raise UserInputError(f"{name}={value!r} is no number", hint=_STARTED_BY)
        return int(value)
    raise UserInputError(f"neither {' nor '.join(names)} is set", hint=_STARTED_BY)


def _short(name: str) -> str:
    return name.split(".", 1)[0]
