"""What Slurm reports, as a topology: nodes with GPUs, leaf switches, blocks.

Only ``sinfo`` with an explicit format and ``scontrol show topology`` are used: both look the same from
Slurm 22.05 to 25.11.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hpjob.core import hostlist
from hpjob.core.errors import EnvironmentProblemError, UserInputError
from hpjob.core.schema import nearest
from hpjob.topology.known_gpus import machine_for
from hpjob.topology.load import load_machine, machine_node
from hpjob.topology.model import Block, Gpu, Node, Switch, Topology

_TIMEOUT_S = 30
_NO_SLURM_HINT = "load the site's Slurm module, or plan for a known machine with --machine NAME"
_UNUSABLE = (
    "down",
    "drain",
    "drng",
    "drained",
    "fail",
    "error",
    "unk",
    "inval",
    "futr",
    "maint",
    "pow_dn",
    "no_respond",
)
_FIELD = re.compile(r"(\w+)=(\S*)")
_GRES_GPU = re.compile(r"gpu(?::([^:,()]*[A-Za-z_][^:,()]*))?:(\d+)(?![^:,()])")
_MIG_PROFILE = re.compile(r"(?:^|_)[0-9]g\.[0-9]+gb", re.I)
"""A site may name the slices of a GPU by their profile."""


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """One line of ``sinfo``."""

    name: str
    partition: str
    state: str
    cpus: int
    memory_gib: float
    gpu_type: str | None
    num_gpus: int

    @property
    def usable(self) -> bool:
        """False for nodes that Slurm will not start a job on; a trailing ``*`` means no answer."""
        return not self.state.endswith("*") and not self.state.startswith(_UNUSABLE)


def parse_sinfo(text: str) -> list[SlurmNode]:
    """Read ``sinfo --Node --noheader --format=%N|%P|%t|%c|%m|%G``; lines of another form are left out."""
    nodes = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split("|")]
        if len(parts) != 6:
            continue
        name, partition, state, cpus, memory_mb, gres = parts
        gpus = _GRES_GPU.findall(gres)
        nodes.append(
            SlurmNode(
                name=name,
                partition=partition,
                state=state.lower(),
                cpus=int(cpus) if cpus.isdigit() else 0,
                memory_gib=round(int(memory_mb.rstrip("+")) / 1024, 2) if memory_mb.rstrip("+").isdigit() else 0.0,
                gpu_type=next((kind for kind, _ in gpus if kind), None),
                num_gpus=sum(int(count) for _, count in gpus),
            )
        )
    return nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """What links the nodes."""

    switches: tuple[Switch, ...] = ()
    blocks: tuple[Block, ...] = ()
    aggregated_blocks: tuple[Block, ...] = ()

    def packed(self, names: Sequence[str]) -> list[str]:
        """Return names leaf by leaf or block by block, the largest first; neighbours in a larger block follow."""
        groups = [leaf.nodes for leaf in self.switches if leaf.level == 0] or [block.nodes for block in self.blocks]
        group_of = {member: index for index, group in enumerate(groups) for member in group}
        above = sorted(self.aggregated_blocks, key=lambda block: len(block.nodes), reverse=True)
        levels = [
            {member: block.name for block in above if len(block.nodes) == size for member in block.nodes}
            for size in dict.fromkeys(len(block.nodes) for block in above)
        ]
        paths = {name: (*(level.get(name, "") for level in levels), group_of.get(name, -1)) for name in names}
        sizes: Counter[tuple[object, ...]] = Counter()
        first: dict[tuple[object, ...], int] = {}
        for place, path in enumerate(paths.values()):
            for length in range(1, len(path) + 1):
                sizes[path[:length]] += 1
                first.setdefault(path[:length], place)

        def order(name: str) -> list[tuple[int, int]]:
            path = paths[name]
            return [(-sizes[path[:n]], first[path[:n]]) for n in range(1, len(path) + 1)]

        return sorted(names, key=order)


def parse_topology(text: str) -> Fabric:
    """Read ``scontrol show topology`` of a tree or of blocks; several records may share a line."""
    switches: list[Switch] = []
    blocks: list[Block] = []
    aggregated: list[Block] = []
    for record in re.split(r"(?=\b(?:SwitchName|BlockName|AggregatedBlock)=)", text):
        fields = dict(_FIELD.findall(record))
        nodes = tuple(hostlist.expand(fields["Nodes"])) if fields.get("Nodes") else ()
        if "SwitchName" in fields:
            children = tuple(hostlist.expand(fields["Switches"])) if fields.get("Switches") else ()
            level = int(fields.get("Level", "0") or 0)
            switches.append(Switch(name=fields["SwitchName"], level=level, nodes=nodes, switches=children))
        elif "BlockName" in fields:
            blocks.append(Block(name=fields["BlockName"], nodes=nodes))
        elif "AggregatedBlock" in fields:
            aggregated.append(Block(name=fields["AggregatedBlock"], nodes=nodes))
    return Fabric(switches=tuple(switches), blocks=tuple(blocks), aggregated_blocks=tuple(aggregated))


def cluster_topology(partition: str | None, num_nodes: int, nodelist: Sequence[str] | None = None) -> Topology:
    """Ask Slurm for nodes and what links them.

    Args:
        partition: Its name; None = the default partition.
        num_nodes: Nodes wanted; those under the fewest leaves are taken as the likely ones.
        nodelist: Names of the nodes given to a job; then exactly these are returned, in this order.

    Raises:
        EnvironmentProblemError: No Slurm client, or the controller does not answer.
        UserInputError: Unknown partition, or fewer usable nodes than asked for.
    """
    wanted = ["--nodes=" + ",".join(nodelist)] if nodelist else [f"--partition={partition}"] if partition else []
    found = parse_sinfo(_ask("sinfo", "--Node", "--noheader", "--format=%N|%P|%t|%c|%m|%G", *wanted))
    fabric, notes = _fabric()
    if nodelist:
        by_name = {node.name: node for node in found}
        missing = [name for name in nodelist if name not in by_name]
        if missing:
            raise EnvironmentProblemError(
                f"Slurm does not know the nodes {hostlist.fold(missing)}", hint="check `scontrol show nodes`"
            )
        chosen = [by_name[name] for name in nodelist]
    else:
        chosen, more = _choose(found, partition, num_nodes, fabric)
        notes += more
    return _topology(chosen, fabric, notes)


def _choose(
    found: list[SlurmNode], partition: str | None, num_nodes: int, fabric: Fabric
) -> tuple[list[SlurmNode], tuple[str, ...]]:
    if partition is None:
        default = [node for node in found if node.partition.endswith("*")]
        found = default or found
    if not found:
        raise _unknown_partition(partition)
    unique = {node.name: node for node in found}
    usable = [node for node in unique.values() if node.usable]
    kinds: dict[tuple[str | None, int], list[SlurmNode]] = {}
    for node in usable:
        kinds.setdefault((node.gpu_type, node.num_gpus), []).append(node)
    largest = max(kinds.values(), key=len, default=[])
    name = partition or (found[0].partition.rstrip("*"))
    if len(largest) < num_nodes:
        out = len(unique) - len(usable)
        raise UserInputError(
            f"{num_nodes} nodes asked for, but partition {name} has {len(largest)} usable nodes of one kind"
            + (f" ({out} are down or drained)" if out else ""),
            hint=f"use --nodes {len(largest)} or less" if largest else "look at `sinfo -R` for the reason",
        )
    # Nodes with GPUs first: a partition that mixes both is asked for its GPUs.
    fitting = [nodes for nodes in kinds.values() if len(nodes) >= num_nodes]
    best = max(fitting, key=lambda nodes: (nodes[0].num_gpus, len(nodes)))
    notes = () if len(kinds) == 1 else (f"partition {name} mixes kinds of nodes; planned for {_kind(best[0])}",)
    by_name = {node.name: node for node in best}
    return [by_name[node] for node in fabric.packed(list(by_name))[:num_nodes]], notes


def _kind(node: SlurmNode) -> str:
    return f"{node.num_gpus} x {node.gpu_type or 'GPU'}" if node.num_gpus else f"{node.cpus} CPUs, no GPU"


def _unknown_partition(partition: str | None) -> UserInputError:
    names = sorted({name.rstrip("*") for name in _ask("sinfo", "--noheader", "--format=%R").split()})
    guess = nearest(partition, names) if partition else None
    asked = f"did you mean `{guess}`? " if guess else ""
    message = f"unknown partition `{partition}`" if partition else "Slurm reports no node"
    return UserInputError(message, hint=f"{asked}partitions are {', '.join(names) or 'none'}")


def _fabric() -> tuple[Fabric, tuple[str, ...]]:
    try:
        fabric = parse_topology(_ask("scontrol", "show", "topology"))
    except EnvironmentProblemError as error:
        return Fabric(), (f"switches are not known: {error.message}",)
    if not fabric.switches and not fabric.blocks:
        return fabric, ("switches are not known: Slurm has no topology configured",)
    return fabric, ()


def _topology(chosen: list[SlurmNode], fabric: Fabric, notes: tuple[str, ...]) -> Topology:
    first = chosen[0]
    name, why = machine_for(first.gpu_type, first.num_gpus)
    machine = load_machine(name) if name else None
    if machine is not None and first.num_gpus and machine.gpus_per_node != first.num_gpus:
        island = min(machine.island_size, first.num_gpus) if machine.island_size <= machine.gpus_per_node else None
        share = first.num_gpus / machine.gpus_per_node
        update = {"gpus_per_node": first.num_gpus, "nic_bandwidth_gb_s": machine.nic_bandwidth_gb_s * share}
        machine = machine.model_copy(update=update | ({"island_size": island} if island else {}))
    nodes = []
    for node in chosen:
        known = machine_node(machine, node.name) if machine and node.num_gpus else None
        gpus = known.gpus if known else tuple(_gpu(i, node.gpu_type) for i in range(node.num_gpus))
        nodes.append(
            Node(
                name=node.name,
                gpus=gpus,
                islands=known.islands if known else None,
                cpus=node.cpus,
                memory_gib=node.memory_gib,
                nic_bandwidth_gb_s=known.nic_bandwidth_gb_s if known else None,
            )
        )
    return Topology(
        nodes=tuple(nodes),
        machine=machine,
        switches=fabric.switches or None,
        blocks=fabric.blocks or None,
        aggregated_blocks=fabric.aggregated_blocks or None,
        source="slurm",
        notes=(*notes, *why),
    )


def _gpu(index: int, gpu_type: str | None) -> Gpu:
    sliced = gpu_type is not None and _MIG_PROFILE.search(gpu_type) is not None
    return Gpu(index=index, model=gpu_type, mig=(str(gpu_type),) if sliced else None)


def _ask(*command: str) -> str:
    if shutil.which(command[0]) is None:
        raise EnvironmentProblemError(f"no Slurm here: `{command[0]}` is not on the PATH", hint=_NO_SLURM_HINT)
    # A site may cut long lines through this variable.
    environment = {key: value for key, value in os.environ.items() if key != "SLURM_TOPO_LEN"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=environment)
    except subprocess.TimeoutExpired:
        raise EnvironmentProblemError(
            f"`{command[0]}` did not answer within {_TIMEOUT_S} s",
            hint="is slurmctld running? try `scontrol ping`",
        ) from None
    if done.returncode != 0:
        lines = [line.split("error: ", 1)[-1].strip() for line in done.stderr.splitlines() if line.strip()]
        detail = lines[0][:160] if lines else f"exit code {done.returncode}"
        raise EnvironmentProblemError(f"`{command[0]}` failed: {detail}", hint=_NO_SLURM_HINT)
    return done.stdout
