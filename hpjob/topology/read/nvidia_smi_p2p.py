"""``nvidia-smi topo -p2p``: between which GPUs peer access works."""

from __future__ import annotations

import re
from collections import Counter
from itertools import permutations

from hpjob.topology.model import Gpu, Island, Link, Node, Topology
from hpjob.topology.read.graph import Pair, disjoint_cliques, islands
from hpjob.topology.read.reading import LOCAL_NODE, Facts, Reader, Reading
from hpjob.topology.read.text import Source
from hpjob.topology.read.topo_header import Vocabulary
from hpjob.topology.read.topo_matrix import Matrix, find_matrix

TITLE = "nvidia-smi topo -p2p"
_WORDS = Vocabulary("X", "OK", "CNS", "GNS", "TNS", "NS", "DR", "U")
_COMMAND = re.compile(r"(?:-p2p|--p2p[_-]?status)[ =]+([a-z]{1,4})\b")


def confidence(source: Source) -> float:
    """High when rows hold status words."""
    if "GPU" not in source.text:
        return 0.0
    matrix = find_matrix(source, _WORDS)
    if matrix is None or not matrix.rows:
        return 0.0
    words = {cell for row in matrix.rows.values() for cell in row.cells} - {"X", None}
    if words:
        return 0.95
    return 0.7 if "Status Ok" in source.text or _COMMAND.search(source.text) else 0.2


def read(source: Source) -> Reading:
    """Read the first status matrix."""
    matrix = find_matrix(source, _WORDS)
    if matrix is None:
        return Reading(kind="nvsmi_p2p", facts={"gpus": None}, notes=("no matrix in this text",))
    gpus = matrix.gpu_columns
    status = _status(matrix, gpus)
    missing = [gpu for gpu in gpus if f"GPU{gpu}" not in matrix.rows]
    whole = not missing and all((a, b) in status for a, b in permutations(gpus, 2))
    working = {(a, b) for a, b in status if a < b and status[a, b] == "OK" and status.get((b, a)) == "OK"}
    capability = _capability(matrix)
    facts: Facts = {
        "gpus": len(gpus),
        "capability": capability,
        "status": dict(Counter(status.values())),
        "rows_missing": missing,
        "p2p_groups": _groups(gpus, working) if whole else None,
    }
    topology = _topology(gpus, status, working, capability == "n") if gpus else None
    return Reading(kind="nvsmi_p2p", facts=facts, topology=topology, notes=tuple(matrix.notes))


def _status(matrix: Matrix, gpus: list[int]) -> dict[Pair, str]:
    found: dict[Pair, str] = {}
    for a, b in permutations(gpus, 2):
        cell = matrix.cell(f"GPU{a}", f"GPU{b}")
        if cell is not None and cell != "X":
            found[a, b] = cell
    return found


def _groups(gpus: list[int], working: set[Pair]) -> list[list[int]]:
    return sorted(clique for group in islands(gpus, working) for clique in disjoint_cliques(group, working))


def _capability(matrix: Matrix) -> str | None:
    first = min((row.number for row in matrix.rows.values()), default=len(matrix.lines))
    found = [match[1] for line in matrix.lines[:first] if "p2p" in line and (match := _COMMAND.search(line))]
    return found[-1] if found else None


def _topology(gpus: list[int], status: dict[Pair, str], working: set[Pair], is_nvlink: bool) -> Topology:
    """Only ``-p2p n`` tells of NVLink; the other letters say what PCIe can do."""
    node = Node(name=LOCAL_NODE, gpus=tuple(Gpu(index=gpu) for gpu in gpus))
    if not is_nvlink:
        return Topology(nodes=(node,), source=TITLE, sources={f"nodes.{LOCAL_NODE}.gpus": TITLE})
    links = tuple(Link(a=a, b=b, linked=(a, b) in working) for a, b in sorted(status) if a < b and (b, a) in status)
    whole = len(links) * 2 == len(gpus) * (len(gpus) - 1)
    found = tuple(
        Island(kind="nvlink", gpus=tuple(group), all_to_all=None if not whole else _complete(group, working))
        for group in islands(gpus, working)
    )
    node = node.model_copy(update={"links": links, "islands": found if whole or found else None})
    names = ("gpus", "links", "islands")
    return Topology(nodes=(node,), source=TITLE, sources={f"nodes.{LOCAL_NODE}.{name}": TITLE for name in names})


def _complete(group: list[int], working: set[Pair]) -> bool:
    return disjoint_cliques(group, working) == [group]


READER = Reader(kind="nvsmi_p2p", title=TITLE, confidence=confidence, read=read)
