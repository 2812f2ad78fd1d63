"""Texts of this project's own making, in the shapes that the tools print."""

from __future__ import annotations

from itertools import combinations

GB_HEADER = "CPU Affinity\tNUMA Affinity\tGPU NUMA ID"


def matrix(
    gpus: int,
    cell: dict[tuple[int, int], str],
    *,
    default: str = "SYS",
    nics: dict[str, list[str]] | None = None,
    affinity: list[str] | None = None,
    header: str = GB_HEADER,
) -> str:
    """A ``topo -m`` matrix with tabs; ``cell`` holds pairs with the smaller index first."""
    names = [f"GPU{k}" for k in range(gpus)]
    nics = nics or {}
    lines = ["\t" + "\t".join([*names, *nics, *([header] if affinity else [])])]
    for a in range(gpus):
        cells = [" X " if a == b else cell.get((min(a, b), max(a, b)), default) for b in range(gpus)]
        cells += [near[a] for near in nics.values()]
        lines.append("\t".join([names[a], *cells, *([affinity[a]] if affinity else [])]))
    for name, near in nics.items():
        others = [" X " if name == other else "SYS" for other in nics]
        lines.append("\t".join([name, *near, *others, *(["", "", "", ""] if affinity else [])]))
    return "\n".join(lines) + "\n"


def all_linked(gpus: int, word: str) -> dict[tuple[int, int], str]:
    """Cells of a board behind NVSwitch."""
    return dict.fromkeys(combinations(range(gpus), 2), word)


def hgx(word: str = "NV18") -> str:
    """Eight GPUs behind NVSwitch with one NIC each, two sockets."""
    nics = {f"NIC{k}": ["PIX" if g == k else "NODE" if g // 4 == k // 4 else "SYS" for g in range(8)] for k in range(8)}
    affinity = [f"{'0-31,64-95' if g < 4 else '32-63,96-127'}\t{g // 4}\t\tN/A" for g in range(8)]
    legend = "\nLegend:\n\n  X    = Self\n\nNIC Legend:\n\n" + "".join(f"  NIC{k}: mlx5_{k + 2}\n" for k in range(8))
    return matrix(8, all_linked(8, word), nics=nics, affinity=affinity) + legend


def cube_mesh() -> str:
    """Eight GPUs in two quads with one cross link each."""
    cells = {pair: "NV1" for pair in combinations(range(8), 2) if pair[0] // 4 == pair[1] // 4}
    cells |= {(k, k + 4): "NV2" for k in range(4)}
    return matrix(8, cells, header="CPU Affinity", affinity=["0-19" if g < 4 else "20-39" for g in range(8)])


class _Fabric:
    """Records of ``ibnetdiscover`` as they grow cable by cable."""

    def __init__(self) -> None:
        self.switches: dict[str, list[str]] = {}
        self.adapters: list[str] = []
        self.names: dict[str, str] = {}
        self.ports: dict[str, int] = {}

    def switch(self, number: int, name: str) -> str:
        node = f"S-{0xAB0000000000 + number:016x}"
        self.names[node] = f"MF0;{name}:MQM9700/U1"
        self.switches[node] = []
        return node

    def adapter(self, number: int, name: str) -> str:
        node = f"H-{0xAB0000000000 + number:016x}"
        self.names[node] = name
        return node

    def cable(self, a: str, b: str) -> None:
        for node in (a, b):
            self.ports[node] = self.ports.get(node, 0) + 1
        self._show(a, b)
        self._show(b, a)

    def _show(self, node: str, peer: str) -> None:
        port, far, name = self.ports[node], self.ports[peer], self.names[peer]
        if node in self.switches:
            guid = f"({peer[2:]}) " if peer[0] == "H" else ""
            self.switches[node].append(f'[{port}]\t"{peer}"[{far}]{guid}\t\t# "{name}" lid 7 4xNDR')
            return
        head = f'Ca\t1 "{node}"\t\t# "{self.names[node]}"\n'
        line = f'[{port}]({node[2:]}) \t"{peer}"[{far}]\t\t# lid 5 lmc 0 "{name}" lid 9 4xNDR\n'
        self.adapters.append(head + line)

    def text(self) -> str:
        lines = ["#", "# Topology file: generated on Mon Jan  1 00:00:00 2024", "#", ""]
        for node, ports in self.switches.items():
            lines += ["vendid=0x2c9", f"switchguid=0x{node[2:]}({node[2:]})"]
            lines += [f'Switch\t65 "{node}"\t\t# "{self.names[node]}" enhanced port 0 lid 1 lmc 0', *ports, ""]
        for record in self.adapters:
            lines += ["vendid=0x2c9", record]
        return "\n".join(lines) + "\n"


def ib_fabric(units: int = 2, rails: int = 4, hosts: int = 3, spines: int = 2, swap: bool = False) -> str:
    """A rail-optimised fabric: one leaf per rail and unit, spines above, aggregation nodes on each leaf."""
    fabric = _Fabric()
    grid = [(rail, unit) for unit in range(units) for rail in range(rails)]
    leaves = {(r, u): fabric.switch(1000 * u + r, f"leaf-r{r + 1:02d}-su{u + 1:02d}") for r, u in grid}
    tops = [fabric.switch(90_000 + k, f"spine-{k + 1:02d}") for k in range(spines)]
    for unit in range(units):
        for host in range(unit * hosts, (unit + 1) * hosts):
            for rail in range(rails):
                adapter = fabric.adapter(100_000 + host * rails + rail, f"node{host:03d} mlx5_{rail}")
                fabric.cable(leaves[1 - rail if swap and host == 0 and rail < 2 else rail, unit], adapter)
    for number, leaf in enumerate(leaves.values()):
        fabric.cable(leaf, fabric.adapter(900_000 + number, "Mellanox Technologies Aggregation Node"))
        for top in tops:
            fabric.cable(leaf, top)
    return fabric.text()


def nccl_xml(gpus: int = 4, switch: bool = True) -> str:
    """A full dump with one NUMA node, a bridge and a NIC per GPU."""
    parts = ['<system version="1">', '  <cpu numaid="0" affinity="ffff" arch="x86_64">']
    for k in range(gpus):
        target = "0000:90:00.0" if switch else f"0000:{0x20 + (k ^ 1):02x}:00.0"
        tclass = "0x068000" if switch else "0x030200"
        parts += [
            f'<pci busid="0000:{0x10 + k:02x}:00.0" class="0x060400">',
            f'<pci busid="0000:{0x20 + k:02x}:00.0" class="0x030200">',
            f'<gpu dev="{k}" sm="90" rank="{gpus - 1 - k}" gdr="1">',
            f'<nvlink target="{target}" count="4" tclass="{tclass}"/></gpu>',
            "</pci>",
            f'<pci busid="0000:{0x30 + k:02x}:00.0" class="0x020700"><nic><net name="mlx5_{k}" dev="{k}"/></nic></pci>',
            "</pci>",
        ]
    return "\n".join([*parts, "  </cpu>", "</system>"]) + "\n"


def slurm_tree(leaves: int = 2, nodes: int = 4) -> str:
    """``scontrol show topology`` of a tree with one root."""
    lines = [
        f"SwitchName=leaf{k} Level=0 LinkSpeed=1 Nodes=n[{k * nodes + 1:03d}-{(k + 1) * nodes:03d}]"
        for k in range(leaves)
    ]
    lines.append(f"SwitchName=top Level=1 LinkSpeed=1 Nodes=n[001-{leaves * nodes:03d}] Switches=leaf[0-{leaves - 1}]")
    return "\n".join(lines) + "\n"
