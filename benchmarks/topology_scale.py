#!/usr/bin/env python3
"""Time and memory of topology readers and of the placement on large inputs, each in a process of its own.

``benchmarks/results/topology_scale.json`` holds recorded figures; its ``command`` wrote them.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

COMMAND = "python benchmarks/topology_scale.py --json benchmarks/results/topology_scale.json"
NODES_PER_LEAF = 25
GPUS_PER_TRAY, TRAYS_PER_BLOCK = 4, 18
SIZES = {
    "slurm-tree": (1_000, 3_000, 10_000),
    "slurm-block": (4_000, 12_000, 18_000, 40_000),
    "ibnetdiscover": (1_000, 3_000, 5_000, 10_000),
    "placement": (1_000, 3_000, 10_000),
}
UNITS = {"slurm-tree": "nodes", "slurm-block": "GPUs", "ibnetdiscover": "hosts", "placement": "nodes"}


def slurm_tree(nodes: int) -> str:
    """Leaves of 25 nodes, a switch above every 20 leaves, one root; upper switches repeat all nodes."""
    leaves = nodes // NODES_PER_LEAF
    lines = []
    for leaf in range(leaves):
        first = leaf * NODES_PER_LEAF
        lines.append(f"SwitchName=leaf{leaf} Level=0 LinkSpeed=1 Nodes=n[{first:05d}-{first + NODES_PER_LEAF - 1:05d}]")
    groups = -(-leaves // 20)
    for group in range(groups):
        last = min(leaves, group * 20 + 20) - 1
        span = f"n[{group * 20 * NODES_PER_LEAF:05d}-{(last + 1) * NODES_PER_LEAF - 1:05d}]"
        lines.append(f"SwitchName=group{group} Level=1 LinkSpeed=1 Nodes={span} Switches=leaf[{group * 20}-{last}]")
    lines.append(f"SwitchName=root Level=2 LinkSpeed=1 Nodes=n[00000-{nodes - 1:05d}] Switches=group[0-{groups - 1}]")
    return "\n".join(lines) + "\n"


def slurm_block(gpus: int) -> str:
    """Blocks of 18 trays with four GPUs each."""
    trays = gpus // GPUS_PER_TRAY
    lines = []
    for number, first in enumerate(range(0, trays, TRAYS_PER_BLOCK)):
        last = min(trays, first + TRAYS_PER_BLOCK) - 1
        lines.append(f"BlockName=b{number:04d} BlockIndex={number} Nodes=t[{first:05d}-{last:05d}] BlockSize=18")
    return "\n".join(lines) + "\n"


def ib_fabric(hosts: int) -> str:
    """Four rails, 18 hosts a unit, 32 spines, every cable from both ends."""
    leaves: dict[tuple[int, int], list[str]] = {}
    adapters = []
    for host in range(hosts):
        unit, port = divmod(host, 18)
        for rail in range(4):
            leaf, hca = f"S-{unit * 4 + rail + 1:016x}", f"H-{0x10000000 + host * 4 + rail:016x}"
            name = f"MF0;leaf-r{rail + 1:02d}-su{unit:03d}:MQM9700/U1"
            ports = leaves.setdefault((unit, rail), [])
            ports.append(f'[{port + 1}]\t"{hca}"[1]({hca[2:]}) \t\t# "host{host:05d} mlx5_{rail}" lid 5 4xNDR')
            adapters.append(
                f'vendid=0x2c9\ndevid=0x1021\ncaguid=0x{hca[2:]}\nCa\t1 "{hca}"\t\t# "host{host:05d} mlx5_{rail}"\n'
                f'[1]({hca[2:]}) \t"{leaf}"[{port + 1}]\t\t# lid 5 lmc 0 "{name}" lid 9 4xNDR\n'
            )
    lines = ["#", "# Topology file: generated on Mon Jan  1 00:00:00 2024", "#", ""]
    for (unit, rail), ports in leaves.items():
        lines.append(
            f'Switch\t65 "S-{unit * 4 + rail + 1:016x}"\t\t# "MF0;leaf-r{rail + 1:02d}-su{unit:03d}:MQM9700/U1" lid 9'
        )
        lines += ports
        lines += [
            f'[{33 + s}]\t"S-{0xF0000 + s:016x}"[{(unit * 4 + rail) % 64 + 1}]\t\t# "spine{s}" lid 3 4xNDR'
            for s in range(32)
        ]
        lines.append("")
    return "\n".join([*lines, *adapters]) + "\n"


MAKERS = {"slurm-tree": slurm_tree, "slurm-block": slurm_block, "ibnetdiscover": ib_fabric}


def measure(name: str, size: int) -> dict[str, Any]:
    """Read one text."""
    from hpjob.topology.read.recognise import read_text

    text = MAKERS[name](size)
    started, cpu = time.perf_counter(), time.process_time()
    reading = read_text(text)
    wall, spent = time.perf_counter() - started, time.process_time() - cpu
    nodes = len(reading.topology.nodes) if reading.topology else 0
    return {"text_mib": round(len(text) / 2**20, 2), "nodes": nodes, **_spent(wall, spent)}


def _spent(wall: float, cpu: float) -> dict[str, float]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"wall_s": round(wall, 2), "cpu_s": round(cpu, 2), "peak_mib": round(peak / 2**10)}


def measure_placement(nodes: int) -> dict[str, Any]:
    """Place 8 ranks a node on a tree whose leaves hold nodes in no order of their names."""
    from hpjob.core.hostlist import expand
    from hpjob.plan.model import ParallelDegrees
    from hpjob.plan.placement import consecutive, place
    from hpjob.plan.placement_cost import Level, placement_cost
    from hpjob.topology.load import load_machine, machine_node
    from hpjob.topology.model import Topology
    from hpjob.topology.read.recognise import read_text

    names = expand(f"n[00000-{nodes - 1:05d}]")
    shuffled = dict(zip(names, random.Random(1).sample(names, nodes), strict=True))
    tree = read_text(slurm_tree(nodes)).topology
    switches = [s.model_copy(update={"nodes": tuple(shuffled[n] for n in s.nodes)}) for s in (tree.switches or ())]
    machine = load_machine("hgx-h100")
    topology = Topology(nodes=tuple(machine_node(machine, n) for n in names), switches=tuple(switches), source="tree")
    degrees = ParallelDegrees(pp=8, dp=nodes // 8, tp=8)
    started, cpu = time.perf_counter(), time.process_time()
    placed = place(degrees, topology, 8)
    wall, spent = time.perf_counter() - started, time.process_time() - cpu
    new = placement_cost(degrees, *placed).leaving("pp", Level.LEAF)
    plain = placement_cost(degrees, *consecutive(topology, 8)).leaving("pp", Level.LEAF)
    links = {"pp_links_between_leaves": new, "pp_links_in_order_of_names": plain}
    return {"nodes": nodes, "ranks": 8 * nodes, **links, **_spent(wall, spent)}


def main() -> int:
    """Run every size in a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SIZE"), help="measure one size in this process")
    parser.add_argument("--only", choices=sorted(SIZES), help="measure one kind in all its sizes")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    if arguments.one:
        name, size = arguments.one[0], int(arguments.one[1])
        print(json.dumps(measure_placement(size) if name == "placement" else measure(name, size)))
        return 0
    found: list[dict[str, Any]] = []
    for name, sizes in SIZES.items():
        for size in sizes if arguments.only in (None, name) else ():
            command = [sys.executable, __file__, "--one", name, str(size)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found.append({"what": name, "size": size, "unit": UNITS[name], **json.loads(done.stdout)})
            print("  ".join(f"{key} {value}" for key, value in found[-1].items()), flush=True)
    if arguments.json:
        machine = {"python": platform.python_version(), "cpu": _cpu_model()}
        document = {"command": COMMAND, "machine": machine, "figures": found}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "not known")


if __name__ == "__main__":
    sys.exit(main())
