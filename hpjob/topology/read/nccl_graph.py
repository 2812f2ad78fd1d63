"""A NCCL graph file (``NCCL_GRAPH_FILE``): the result of a search, no topology; it is refused."""

from __future__ import annotations

import re

from hpjob.topology.read.reading import Reader, Reading
from hpjob.topology.read.text import Source

TITLE = "NCCL graph XML"
_GRAPHS = re.compile(r"<graphs[\s>]|<graph\s[^>]{0,500}pattern=")


def confidence(source: Source) -> float:
    """Certain when graph elements with a pattern are there."""
    return 0.97 if "<graph" in source.text and _GRAPHS.search(source.text) else 0.0


def read(source: Source) -> Reading:
    """Say that it is no topology."""
    del source
    note = "a NCCL graph (rings and trees found by a search) is no topology; give the file of NCCL_TOPO_DUMP_FILE"
    return Reading(kind="nccl_graph", facts={"is_topology": False, "gpus": None}, notes=(note,))


READER = Reader(kind="nccl_graph", title=TITLE, confidence=confidence, read=read)
