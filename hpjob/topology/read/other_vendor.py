"""Matrices of other vendors that copy the shape of ``nvidia-smi topo -m`` with words of their own."""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations

from hpjob.topology.model import Gpu, Island, Node, Topology
from hpjob.topology.read.affinity import read_affinity
from hpjob.topology.read.graph import Pair, all_linked, islands, largest_cliques
from hpjob.topology.read.reading import LOCAL_NODE, Facts, Reader, Reading
from hpjob.topology.read.text import Source
from hpjob.topology.read.topo_header import PCIE_LEVELS, TOPO_WORDS, Vocabulary
from hpjob.topology.read.topo_matrix import Matrix, find_matrix

TITLE = "topology matrix of another vendor"
_OTHER_LABEL = re.compile(r"\b(?:NPU|DCU|MLU|XPU|HPU|GCU|PPU|DEV|Device|Card|Phy-ID|GPU)[ _-]?([0-9]{1,4})\b", re.I)
_LABEL_NEEDLES = ("GPU", "NPU", "DCU", "MLU", "XPU", "HPU", "GCU", "PPU", "DEV", "Device", "Card", "Phy-ID")
_MAX_CANDIDATES = 4_096
_BOX = re.compile(r"[│┃║|+┼╋╬├┤┌┐└┘─━═╔╗╚╝╠╣╦╩]")
_CELL = re.compile(r"(?!N/A|GPU|NIC|CPU|NUMA)[A-Z][A-Z0-9_]{1,11}")
_NO_LINK = ("NA", "NS", "U", "UNKNOWN", "NONE", "SELF", "OK", "CNS", "GNS", "TNS", "DR")
_SELF_WORDS = re.compile(r"(?<=\s)(?:SELF|Self|self|-|\*|0)(?=\s|$)")


def confidence(source: Source) -> float:
    """Moderate when a square of labels holds words that NVIDIA's tool does not print."""
    if "X" not in source.text and "elf" not in source.text:
        return 0.0
    plain = _normalised(source)
    word = _link_word(plain)
    return 0.92 if word is not None else 0.0


def read(source: Source) -> Reading:
    """Read the first matrix with the vendor's own link word added to the vocabulary."""
    plain = _normalised(source)
    word = _link_word(plain)
    matrix = find_matrix(plain, _vocabulary(word))
    if matrix is None:
        return Reading(kind="other_vendor", facts={"gpus": None}, notes=("no matrix in this text",))
    gpus = matrix.gpu_columns
    linked, levels = _cells(matrix, gpus, word)
    groups = islands(gpus, linked)
    affinity = read_affinity(matrix, [f"GPU{gpu}" for gpu in gpus])
    numa = [affinity[f"GPU{gpu}"].numa if f"GPU{gpu}" in affinity else None for gpu in gpus]
    facts: Facts = {
        "gpus": len(gpus),
        "link_word": word,
        "link_islands": groups,
        "pcie_levels_seen": [level for level in PCIE_LEVELS if level in levels],
        "numa_of_gpu": numa,
    }
    node = Node(
        name=LOCAL_NODE,
        gpus=tuple(Gpu(index=g, numa=n if isinstance(n, int) else None) for g, n in zip(gpus, numa, strict=True)),
        islands=tuple(_island(group, linked) for group in groups),
    )
    notes = (*matrix.notes, f"{word} is taken for the vendor's own link") if word else tuple(matrix.notes)
    sources = {f"nodes.{LOCAL_NODE}.{name}": TITLE for name in ("gpus", "islands")}
    topology = Topology(nodes=(node,), source=TITLE, notes=notes, sources=sources)
    return Reading(kind="other_vendor", facts=facts, topology=topology, notes=notes)


def _island(group: list[int], linked: set[Pair]) -> Island:
    whole = all_linked(group, linked)
    return Island(kind="nvlink", gpus=tuple(group), all_to_all=whole, cliques=largest_cliques(group, linked, whole))


def _normalised(source: Source) -> Source:
    """Boxes become blanks, labels become GPUn; bounded to what a matrix may need."""
    if "other vendor" in source.cache:
        known: Source = source.cache["other vendor"]
        return known
    places: dict[int, str] = {}
    for needle in _LABEL_NEEDLES:
        places.update(place for place in source.lines_with(needle, _MAX_CANDIDATES) if len(place[1]) < 20_000)
    chosen = [places[at] for at in sorted(places) if _OTHER_LABEL.search(places[at])][:4096]
    source.cache["other vendor"] = Source("\n".join(map(_plain_line, chosen)))
    plain: Source = source.cache["other vendor"]
    return plain


def _plain_line(line: str) -> str:
    line = _OTHER_LABEL.sub(r"GPU\1", _BOX.sub(" ", line))
    return line if " X" in line or "\tX" in line else _SELF_WORDS.sub("X", line, count=1)


def _link_word(plain: Source) -> str | None:
    """The most frequent word of the rows that is neither a PCIe level nor a word for none, seen at both ends of a pair.

    A damaged or glued word of NVIDIA's tool is no word of another vendor.
    """
    counts: Counter[str] = Counter()
    for line in plain.lines:
        words = line.split()
        if len(words) < 3 or not re.fullmatch(r"GPU[0-9]+", words[0]) or "X" not in words:
            continue
        counts.update(word for word in words[1:] if _CELL.fullmatch(word))
    if any(re.fullmatch(r"NV[0-9]+", word) for word in counts):
        return None
    for word, count in counts.most_common():
        is_part = any(level.startswith(word) for level in PCIE_LEVELS)
        if count > 1 and word not in _NO_LINK and not is_part and not TOPO_WORDS.words.fullmatch(word):
            return word
    return None


def _vocabulary(word: str | None) -> Vocabulary:
    known = ["X", *PCIE_LEVELS, "NV[0-9]{1,2}", "NA"]
    return Vocabulary(*([re.escape(word), *known] if word else known))


def _cells(matrix: Matrix, gpus: list[int], word: str | None) -> tuple[set[Pair], set[str]]:
    linked: set[Pair] = set()
    levels: set[str] = set()
    for a, b in combinations(sorted(set(gpus)), 2):
        cells = {matrix.cell(f"GPU{a}", f"GPU{b}"), matrix.cell(f"GPU{b}", f"GPU{a}")} - {None}
        if cells == {word}:
            linked.add((a, b))
        levels |= {cell for cell in cells if cell in PCIE_LEVELS}
    return linked, levels


READER = Reader(kind="other_vendor", title=TITLE, confidence=confidence, read=read)
