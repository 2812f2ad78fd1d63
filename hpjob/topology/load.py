"""Topologies from packaged machine descriptions, from files and of this host."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from hpjob.core import yaml_text
from hpjob.core.errors import UserInputError
from hpjob.core.resources import data_file, data_names
from hpjob.core.schema import nearest, parse
from hpjob.topology.model import Block, Gpu, Island, MachineType, Node, Topology

_SUFFIX = ".yaml"
_GPU_KINDS = ("nvlink", "xgmi")
_MOST_NODES = 20_000
"""More than any cluster has; a mistyped number is refused before it becomes as many records."""


def machine_names() -> list[str]:
    """Return the names of the packaged machines."""
    return data_names("topology", _SUFFIX)


def load_machine(name_or_path: str) -> MachineType:
    """Load a packaged machine by name or one from a YAML file.

    Raises:
        UserInputError: Unknown name, unreadable file or wrong values.
    """
    path = Path(name_or_path)
    if path.suffix not in {".yaml", ".yml"}:
        path = data_file("topology", name_or_path + _SUFFIX)
        if not path.is_file():
            names = machine_names()
            guess = nearest(name_or_path.lower().replace("_", "-"), names)
            asked = f"did you mean `{guess}`? " if guess else ""
            raise UserInputError(
                f"unknown machine `{name_or_path}`", hint=f"{asked}packaged machines are {', '.join(names)}"
            )
    return parse(MachineType, _document(path, f"machine {name_or_path}"), source=f"machine {name_or_path}")


def load_topology(path: str) -> Topology:
    """Load a topology from a YAML or JSON file, such as a run folder's ``topology.yaml``.

    Raises:
        UserInputError: Unreadable file or wrong values.
    """
    return parse(Topology, _document(Path(path), f"topology {path}"), source=f"topology {path}")


def dump_topology(topology: Topology) -> str:
    """Write a topology as YAML that :func:`load_topology` reads back unchanged."""
    return yaml_text.dump(topology.model_dump(mode="json"))


def machine_topology(machine: MachineType, num_nodes: int) -> Topology:
    """Return ``num_nodes`` nodes of one kind under one leaf switch, with names ``node-0``, ``node-1``, …

    Raises:
        UserInputError: More nodes than any cluster has.
    """
    _check_count(num_nodes)
    names = [f"node-{index}" for index in range(num_nodes)]
    return Topology(
        nodes=tuple(machine_node(machine, name) for name in names),
        machine=machine,
        blocks=_blocks(machine, names),
        source=f"machine:{machine.name}",
        notes=("switches are not known: nodes are taken to be equally far from each other",) if num_nodes > 1 else (),
    )


def machine_node(machine: MachineType, name: str) -> Node:
    """Return one node of a known kind."""
    gpus = tuple(
        Gpu(index=index, model=machine.gpu_model, memory_gib=machine.gpu_memory_gib)
        for index in range(machine.gpus_per_node)
    )
    return Node(name=name, gpus=gpus, islands=_islands(machine), nic_bandwidth_gb_s=machine.nic_bandwidth_gb_s)


def _check_count(num_nodes: int) -> None:
    if num_nodes > _MOST_NODES:
        raise UserInputError(
            f"{num_nodes} nodes asked for, more than any cluster has", hint=f"use --nodes {_MOST_NODES} or less"
        )


def _islands(machine: MachineType) -> tuple[Island, ...]:
    size = min(machine.island_size, machine.gpus_per_node)
    if machine.island_kind not in _GPU_KINDS or size < 2:
        return ()
    kind: Literal["nvlink", "xgmi"] = "nvlink" if machine.island_kind == "nvlink" else "xgmi"
    return tuple(
        Island(
            kind=kind,
            gpus=tuple(range(start, min(start + size, machine.gpus_per_node))),
            all_to_all=True,
            bandwidth_gb_s=machine.island_bandwidth_gb_s,
        )
        for start in range(0, machine.gpus_per_node, size)
    )


def _blocks(machine: MachineType, names: list[str]) -> tuple[Block, ...] | None:
    """Group nodes whose GPUs share one NVLink domain."""
    nodes_per_island = machine.island_size // machine.gpus_per_node
    if machine.island_kind not in _GPU_KINDS or nodes_per_island < 2:
        return None
    return tuple(
        Block(name=f"domain-{start // nodes_per_island}", nodes=tuple(names[start : start + nodes_per_island]))
        for start in range(0, len(names), nodes_per_island)
    )


def local_topology(num_nodes: int, gpus_per_node: int | None = None) -> Topology:
    """Return this host as ``num_nodes`` virtual nodes ``local-0``, … that share its cores and memory.

    Args:
        num_nodes: Virtual nodes.
        gpus_per_node: Ranks a node, each a process on the host's cores.

    Raises:
        UserInputError: More nodes than any cluster has.
    """
    import psutil  # noqa: PLC0415

    _check_count(num_nodes)

    machine = load_machine("cpu")
    ranks = gpus_per_node or machine.gpus_per_node
    memory_gib = psutil.virtual_memory().total / 2**30
    cores = psutil.cpu_count() or 1
    processes = num_nodes * ranks
    shared = machine.model_copy(
        update={
            "gpus_per_node": ranks,
            "island_size": ranks,
            "gpu_memory_gib": round(memory_gib / processes, 2),
            "peak_tflops_bf16": machine.peak_tflops_bf16 * min(1.0, cores / processes),
            "peak_tflops_fp32": machine.peak_tflops_fp32 * min(1.0, cores / processes),
        }
    )
    gpus = tuple(Gpu(index=index, model="cpu", memory_gib=shared.gpu_memory_gib) for index in range(ranks))
    nodes = tuple(
        Node(name=f"local-{i}", gpus=gpus, islands=(), cpus=cores, memory_gib=round(memory_gib, 2))
        for i in range(num_nodes)
    )
    note = f"all virtual nodes are this host: {cores} cores and {memory_gib:.1f} GiB for {processes} ranks"
    return Topology(nodes=nodes, machine=shared, source="local", notes=(note,))


def _document(path: Path, source: str) -> object:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserInputError(f"{source}: no such file", hint="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserInputError(f"{source}: cannot be read: {error}", hint="give a readable UTF-8 file") from None
    document, refused = yaml_text.load(text, source=source)
    if refused:
        raise UserInputError("\n".join(f"{source}: {line}" for line in refused), hint="correct the lines above")
    return document
