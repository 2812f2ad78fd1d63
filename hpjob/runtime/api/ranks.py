"""Which rank this is, as torchrun or srun tells it. Needs no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from hpjob.core.errors import UserInputError

_HINT = "start the script with torchrun or srun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """One process of a job."""

    rank: int
    local_rank: int
    world_size: int
    master_addr: str
    master_port: int


def ranks_of_environment(env: Mapping[str, str] = os.environ) -> Ranks:
    """Read the variables of torchrun, else of srun; without any, this is the only rank.

    Raises:
        UserInputError: Some are missing.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        values = {name: env.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
        missing = [name for name, value in values.items() if not value]
        if missing:
            raise UserInputError(f"{' and '.join(missing)} not set", hint=_HINT)
        return Ranks(
            rank=int(env["RANK"]),
            local_rank=int(env.get("LOCAL_RANK", env["RANK"])),
            world_size=int(env["WORLD_SIZE"]),
            master_addr=env["MASTER_ADDR"],
            master_port=int(env["MASTER_PORT"]),
        )
    if "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
        return _of_srun(env)
    return Ranks(rank=0, local_rank=0, world_size=1, master_addr="127.0.0.1", master_port=0)


def world_size_of_environment() -> int:
    """Return the size of an initialised process group, else what torchrun or srun says."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    return ranks_of_environment().world_size


def _of_srun(env: Mapping[str, str]) -> Ranks:
    from ClusterShell.NodeSet import NodeSet  # noqa: PLC0415

    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if not nodes and "MASTER_ADDR" not in env:
        raise UserInputError("neither SLURM_STEP_NODELIST nor MASTER_ADDR is set", hint=_HINT)
    # The same on every rank, and another for another job on the same nodes.
    port = _FIRST_PORT + int(env.get("SLURM_JOB_ID", "0")) % _NUM_PORTS
    return Ranks(
        rank=int(env["SLURM_PROCID"]),
        local_rank=int(env.get("SLURM_LOCALID", "0")),
        world_size=int(env["SLURM_NTASKS"]),
        master_addr=env.get("MASTER_ADDR") or str(NodeSet(nodes)[0]),
        master_port=int(env.get("MASTER_PORT", port)),
    )
