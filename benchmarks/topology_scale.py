#!/usr/bin/env python3
"""Time and memory of the topology readers on large inputs, each in a process of its own."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

NODES_PER_LEAF = 25
GPUS_PER_TRAY, TRAYS_PER_BLOCK = 4, 18
SIZES = {
    "slurm-tree": (1_000, 3_000, 10_000),
    "slurm-block": (1_800, 6_000, 18_000),
    "ibnetdiscover": (500, 1_500, 5_000),
}
UNITS = {"slurm-tree": "nodes", "slurm-block": "GPUs", "ibnetdiscover": "hosts"}


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


def measure(name: str, size: int) -> None:
    """Read one text and print one line."""
    from hpjob.topology.read.recognise import read_text

    text = MAKERS[name](size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, cpu = time.perf_counter(), time.process_time()
    reading = read_text(text)
    wall, spent = time.perf_counter() - started, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    nodes = len(reading.topology.nodes) if reading.topology else 0
    print(
        f"{name:14} {size:6d} {UNITS[name]:5}  {len(text) / 2**20:6.2f} MiB text  {nodes:6d} nodes  "
        f"{wall:5.2f} s wall  {spent:5.2f} s CPU  peak {peak / 2**10:5.0f} MiB (+{(peak - before) / 2**10:.0f})"
    )


def main() -> int:
    """Run every size in a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SIZE"), help="measure one size in this process")
    arguments = parser.parse_args()
    if arguments.one:
        measure(arguments.one[0], int(arguments.one[1]))
        return 0
    for name, sizes in SIZES.items():
        for size in sizes:
            subprocess.run([sys.executable, __file__, "--one", name, str(size)], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
