"""``nvidia-smi topo -m``: NVLink islands, PCIe levels, nearest NICs and affinity of the GPUs of a node."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from hpjob.topology.model import Gpu, Island, Link, Nic, Node, Topology
from hpjob.topology.read.affinity import Affinity, expand_cpus, read_affinity
from hpjob.topology.read.graph import Pair, all_linked, best_quads, islands, maximal_cliques
from hpjob.topology.read.reading import LOCAL_NODE, Facts, Reader, Reading
from hpjob.topology.read.text import Source
from hpjob.topology.read.topo_header import INDEXED, PCIE_LEVELS, TOPO_WORDS
from hpjob.topology.read.topo_matrix import Matrix, find_matrix

TITLE = "nvidia-smi topo -m"
_PCIE_ONLY = re.compile(r"topo\s+(?:-i\s+\S+\s+)?(?:-mp|--matrix-pci|--matrix_pci)\b")
_LEGEND = re.compile(
    r"\b(NIC[0-9]{1,4})[ \t]{0,40}(?:[:=(]|[-=]>|→|-|is\b|[ \t])[ \t]{0,40}[(:=]?[ \t]{0,8}"
    r"((?=[A-Za-z_.:+-]{0,40}[0-9])[A-Za-z][A-Za-z0-9_.:+-]{1,63})"
)
_RAIL = re.compile(r"\brail\s*#?[:=]?\s*([0-9]{1,4})\b", re.I)
_FAR = ("SYS", "SOC")
_MANY_CPUS = 100
"""CPUs of one NUMA node above which a host without NUMA (``numa=off``, a flat VM) is suspected."""


@dataclass
class _Pairs:
    """What the matrix shows of every pair of GPUs, the smaller index first."""

    linked: dict[Pair, int] = field(default_factory=dict)
    levels: dict[Pair, str] = field(default_factory=dict)
    unknown: list[Pair] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def confidence(source: Source) -> float:
    """High when rows of cells are there; a command line alone is not enough."""
    if "GPU" not in source.text:
        return 0.0
    matrix = find_matrix(source)
    if matrix is None or not any(label.startswith("GPU") for label in matrix.rows):
        return 0.3 if matrix is not None and matrix.affinity else 0.0
    words = {cell for row in matrix.rows.values() for cell in row.cells} - {"X", None}
    return 0.9 if words else (0.6 if matrix.affinity or "topo -m" in source.text else 0.4)


def read(source: Source) -> Reading:
    """Read the first matrix; a text without one gives nulls."""
    matrix = find_matrix(source)
    if matrix is None:
        return Reading(kind="nvsmi_topo", facts={"gpus": None}, notes=("no matrix in this text",))
    gpus = matrix.gpu_columns or sorted(int(label[3:]) for label in matrix.rows if re.fullmatch(r"GPU[0-9]+", label))
    pairs = _read_pairs(matrix, gpus)
    names, rails = _legend(matrix)
    affinity = read_affinity(matrix, [f"GPU{gpu}" for gpu in gpus])
    hidden = _hides_nvlink(matrix)
    facts = _link_facts(gpus, pairs, hidden)
    near = _near_nics(matrix, gpus)
    facts |= _nic_facts(matrix, gpus, near, names, rails)
    facts |= _affinity_facts(gpus, affinity)
    notes = [*matrix.notes, *pairs.notes, *_degraded(facts), *_suspicions(gpus, affinity, hidden)]
    topology = _topology(facts, gpus, pairs, affinity, hidden, notes)
    return Reading(kind="nvsmi_topo", facts=facts, topology=topology, notes=tuple(notes))


def _read_pairs(matrix: Matrix, gpus: list[int]) -> _Pairs:
    pairs = _Pairs()
    for a, b in combinations(sorted(set(gpus)), 2):
        cells = {matrix.cell(f"GPU{a}", f"GPU{b}"), matrix.cell(f"GPU{b}", f"GPU{a}")} - {None, "X"}
        if len(cells) == 1:
            cell = str(cells.pop())
            if cell.startswith("NV"):
                pairs.linked[a, b] = int(cell[2:])
            else:
                pairs.levels[a, b] = cell
            continue
        pairs.unknown.append((a, b))
        if cells:
            pairs.notes.append(f"GPU{a} and GPU{b} disagree about their link: {', '.join(sorted(map(str, cells)))}")
    return pairs


def _hides_nvlink(matrix: Matrix) -> bool:
    first = min((row.number for row in matrix.rows.values()), default=len(matrix.lines))
    return any(_PCIE_ONLY.search(line) for line in matrix.lines[:first] if "topo" in line)


def _link_facts(gpus: list[int], pairs: _Pairs, hidden: bool) -> Facts:
    linked = set(pairs.linked)
    groups = islands(gpus, linked)
    touched = {gpu for pair in linked for gpu in pair}
    unsure = {gpu for pair in pairs.unknown for gpu in pair} - touched
    seen_any = bool(pairs.linked or pairs.levels or not pairs.unknown)
    complete: bool | None = all(all_linked(group, linked) for group in groups)
    facts: Facts = {"gpus": len(gpus)}
    if hidden or not seen_any:
        facts |= dict.fromkeys(("nvlink_islands", "nvlinks_per_pair", "gpus_without_nvlink", "all_to_all"))
    else:
        facts["nvlink_islands"] = groups
        facts["nvlinks_per_pair"] = sorted(set(pairs.linked.values()))
        facts["gpus_without_nvlink"] = [gpu for gpu in gpus if gpu not in touched and gpu not in unsure]
        facts["all_to_all"] = complete if groups and not pairs.unknown else None
        if unsure:
            facts["nvlink_unknown_for"] = sorted(unsure)
    if pairs.unknown:
        facts["unknown_pairs"] = [list(pair) for pair in pairs.unknown]
    levels = [level for level in PCIE_LEVELS if level in pairs.levels.values()]
    if levels:
        facts["pcie_levels_seen"] = levels
    absent = any(pair in pairs.levels for group in groups for pair in combinations(group, 2))
    quads = best_quads(groups[0], linked) if len(groups) == 1 and absent and not hidden else None
    if quads:
        facts["best_quads"] = quads
    return facts


def _near_nics(matrix: Matrix, gpus: list[int]) -> dict[int, tuple[str, list[str]] | None]:
    """Nearest level and the labels of all NICs at it; a GPU with an unknown cell is left out."""
    near: dict[int, tuple[str, list[str]] | None] = {}
    nics = matrix.nic_columns
    for gpu in gpus:
        row = f"GPU{gpu}"
        cells = {nic: matrix.cell(row, nic) or matrix.cell(nic, row) for nic in nics}
        if not nics or any(cell is None or cell not in PCIE_LEVELS for cell in cells.values()):
            continue
        best = min((str(cell) for cell in cells.values()), key=PCIE_LEVELS.index)
        near[gpu] = None if best in _FAR else (best, [nic for nic, cell in cells.items() if cell == best])
    return near


def _legend(matrix: Matrix) -> tuple[dict[str, str], dict[str, int]]:
    first = min((row.number for row in matrix.rows.values()), default=0)
    names: dict[str, str] = {}
    rails: dict[str, int] = {}
    for line in matrix.lines[first:]:
        entries = list(_LEGEND.finditer(line)) if "NIC" in line and len(line) < 4000 else []
        ends = [entry.start() for entry in entries[1:]] + [len(line)]
        for match, end in zip(entries, ends, strict=False):
            if match[1] in names or TOPO_WORDS.words.fullmatch(match[2]) or INDEXED.fullmatch(match[2]):
                continue
            names[match[1]] = match[2].rstrip(":.,-")
            rail = _RAIL.search(line, match.end(), end)
            if rail:
                rails[match[1]] = int(rail[1])
    return names, rails


def _nic_facts(
    matrix: Matrix,
    gpus: list[int],
    near: dict[int, tuple[str, list[str]] | None],
    names: dict[str, str],
    rails: dict[str, int],
) -> Facts:
    labels = matrix.nic_columns
    facts: Facts = {"nics": len(labels)}
    if not labels:
        return facts
    facts["nic_names"] = [names.get(label, label) for label in labels]
    facts["near_nics"] = {
        str(gpu): None if found is None else {"level": found[0], "nics": [names.get(nic, nic) for nic in found[1]]}
        for gpu, found in near.items()
    }
    if rails:
        facts["rail_of_gpu"] = [_rail_of(near.get(gpu), rails) for gpu in gpus]
    return facts


def _rail_of(near: tuple[str, list[str]] | None, rails: dict[str, int]) -> int | None:
    found = {rails.get(nic) for nic in near[1]} if near else set()
    return found.pop() if len(found) == 1 else None


def _affinity_facts(gpus: list[int], affinity: dict[str, Affinity]) -> Facts:
    empty = Affinity()
    rows = [affinity.get(f"GPU{gpu}", empty) for gpu in gpus]
    facts: Facts = {"numa_of_gpu": [row.numa for row in rows] if any(row.numa is not None for row in rows) else None}
    cpus: dict[str, list[int]] = {}
    for gpu, row in zip(gpus, rows, strict=True):
        if row.cpu is not None:
            cpus.setdefault(row.cpu, []).append(gpu)
    if cpus:
        facts["cpus"] = cpus
    if any(row.gpu_numa is not None for row in rows):
        facts["gpu_numa_id"] = [row.gpu_numa for row in rows]
    return facts


def _degraded(facts: Facts) -> list[str]:
    """A GPU that shows no NVLink where the others do has dead links, or is another kind of card."""
    alone = facts["gpus_without_nvlink"] if facts["nvlink_islands"] else None
    return [f"GPU {', '.join(map(str, alone))} shows no NVLink, the others do"] if alone else []


def _suspicions(gpus: list[int], affinity: dict[str, Affinity], hidden: bool) -> list[str]:
    notes = ["topo -mp hides NVLink: that none shows proves nothing"] if hidden else []
    rows = [affinity[f"GPU{gpu}"] for gpu in gpus if f"GPU{gpu}" in affinity]
    if len(rows) > 2 and {row.numa for row in rows} == {0}:
        cpus = {row.cpu for row in rows}
        only = cpus.pop() if len(cpus) == 1 else None
        if only and len(expand_cpus(only)) > _MANY_CPUS:
            notes.append(f"all GPUs claim NUMA node 0 with CPUs {only}: booted with numa=off, or a VM")
    return notes


def _topology(
    facts: Facts, gpus: list[int], pairs: _Pairs, affinity: dict[str, Affinity], hidden: bool, notes: list[str]
) -> Topology:
    linked = set(pairs.linked)
    groups: list[list[int]] | None = facts["nvlink_islands"]
    empty = Affinity()
    numa = {gpu: affinity.get(f"GPU{gpu}", empty).numa for gpu in gpus}
    node = Node(
        name=LOCAL_NODE,
        gpus=tuple(Gpu(index=gpu, numa=value if isinstance(value := numa[gpu], int) else None) for gpu in gpus),
        islands=None if groups is None else tuple(_island(group, pairs, linked) for group in groups),
        links=tuple(_links(gpus, pairs, hidden)),
        nics=_nics(facts, gpus),
    )
    return Topology(
        nodes=(node,),
        source=TITLE,
        notes=tuple(notes),
        sources={f"nodes.{LOCAL_NODE}.{name}": TITLE for name in ("gpus", "islands", "links", "nics")},
    )


def _island(group: list[int], pairs: _Pairs, linked: set[Pair]) -> Island:
    inside = set(group)
    unknown = any(a in inside and b in inside for a, b in pairs.unknown)
    complete = None if unknown else all_linked(group, linked)
    cliques = [] if complete else maximal_cliques(group, linked)
    largest = [clique for clique in cliques if len(clique) == len(cliques[0])] if cliques else []
    return Island(kind="nvlink", gpus=tuple(group), all_to_all=complete, cliques=tuple(map(tuple, largest)))


def _links(gpus: list[int], pairs: _Pairs, hidden: bool) -> list[Link]:
    found: list[Link] = []
    for a, b in combinations(sorted(set(gpus)), 2):
        level = pairs.levels.get((a, b))
        count = pairs.linked.get((a, b))
        absent = False if level is not None and not hidden else None
        found.append(Link(a=a, b=b, linked=True if count else absent, count=count, pcie_level=level))
    return found


def _nics(facts: Facts, gpus: list[int]) -> tuple[Nic, ...]:
    near: dict[str, Any] = facts.get("near_nics", {})
    rails: list[int | None] = facts.get("rail_of_gpu", [])
    whole = len(near) == len(gpus)
    found: list[Nic] = []
    for name in facts.get("nic_names", []):
        close = tuple(gpu for gpu in gpus if near.get(str(gpu)) and name in near[str(gpu)]["nics"])
        named = {rails[gpus.index(gpu)] for gpu in close} if rails else set()
        rail = named.pop() if len(named) == 1 else None
        found.append(
            Nic(
                name=name, near_gpus=close if whole else None, rail=rail, rail_from="text" if rail is not None else None
            )
        )
    return tuple(found)


READER = Reader(kind="nvsmi_topo", title=TITLE, confidence=confidence, read=read)
