"""The header of a ``topo`` matrix, and the words that its cells may hold."""

from __future__ import annotations

import re

PCIE_LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC")
"""From near to far; SOC is what old drivers call SYS."""

GPU = re.compile(r"GPU([0-9]{1,4})")
INDEXED = re.compile(r"(?:GPU|NIC)[0-9]{1,4}")
DEVICE = re.compile(r"(?=[^0-9]{0,63}[0-9])[A-Za-z][A-Za-z0-9_.:+-]{1,63}")
"""Name of an RDMA device, such as mlx5_0 or rocep4s0f1."""
_TWO_DEVICES = re.compile(r"(mlx[0-9]+_[0-9]+)(?=mlx)")
_AFFINITY = (
    ("gpu_numa", re.compile(r"GPU\s*NUMA\s*ID", re.I)),
    ("cpu", re.compile(r"CPU\s*Affinity", re.I)),
    ("numa", re.compile(r"(?:NUMA|Node)\s*Affinity", re.I)),
)
_HEADER_LEFTOVER = re.compile(r"(?:C|CP|CPU|N|NU|NUM|NUMA|Node|G|GP|GPU|I|ID|A[a-z]{0,7})", re.I)
MAX_COLUMNS = 2048
Header = tuple[list[str], list[str]]
"""Labels of the columns, names of the affinity columns."""


class Vocabulary:
    """The words that a cell may hold."""

    def __init__(self, *words: str) -> None:
        word = f"(?:{'|'.join(words)})"
        self.word = re.compile(word)
        self.words = re.compile(f"{word}+")
        self.glued_row = re.compile(rf"((?:GPU|NIC)[0-9]{{1,4}})({word}+)")


TOPO_WORDS = Vocabulary("X", "NV[0-9]{1,2}", *PCIE_LEVELS)


def parse_header(line: str, words: Vocabulary = TOPO_WORDS) -> Header | None:
    """Return the column labels and affinity columns of a header line, or None when it is none."""
    if "GPU" not in line or len(line) > 40_000:
        return None
    text = line.replace("|", " ")
    begin = text.find("GPU0") if "GPU0" in text else text.find("GPU")
    labels, affinity, leftover = split_header(text[begin:], words)
    prefix = text[:begin].split()
    if not any(GPU.fullmatch(label) for label in labels) or any(words.word.fullmatch(word) for word in leftover):
        return None
    if any(not _HEADER_LEFTOVER.fullmatch(word) for word in leftover) and not affinity:
        return None
    if any(words.words.fullmatch(word) for word in prefix) or len(labels) > MAX_COLUMNS:
        return None
    before = [word for word in prefix if INDEXED.fullmatch(word)]
    return [*before, *labels], affinity


def split_header(text: str, words: Vocabulary) -> tuple[list[str], list[str], list[str]]:
    """Return labels, affinity columns, and words that are neither."""
    found: list[tuple[int, str]] = []
    for name, pattern in _AFFINITY:
        match = pattern.search(text)
        if match:
            found.append((match.start(), name))
            text = text[: match.start()] + " " * (match.end() - match.start()) + text[match.end() :]
    labels: list[str] = []
    leftover: list[str] = []
    limit = min((start for start, _ in found), default=len(text))
    for match in re.finditer(r"\S+", text):
        pieces = _label_pieces(match[0].replace("\ufffd", ""), words)
        if pieces and match.start() < limit:
            labels.extend(pieces)
        else:
            leftover.append(match[0])
    return labels, [name for _, name in sorted(found)], leftover


def _label_pieces(word: str, words: Vocabulary) -> list[str]:
    indexed = INDEXED.findall(word)
    if indexed and "".join(indexed) == word:
        return list(indexed)
    if words.words.fullmatch(word):
        return []
    pieces = _TWO_DEVICES.sub(r"\1 ", word).split()
    return pieces if all(DEVICE.fullmatch(piece) for piece in pieces) else []
