"""``python -m hpjob.topology.detect.node_report``: one line of JSON about this node, for a step over many nodes."""

from __future__ import annotations

import os
import sys

from hpjob.topology.detect.node import detect_node
from hpjob.topology.read.recognise import read_text

PREFIX = "hpjob-topology:"


def report() -> str:
    """Return the line: a prefix that other output of a site's prolog cannot be taken for, then JSON."""
    found = detect_node()
    addr = os.environ.get("SLURM_TOPOLOGY_ADDR")
    if addr:
        pattern = os.environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
        lines = f"SLURM_TOPOLOGY_ADDR={addr}\n" + (f"SLURM_TOPOLOGY_ADDR_PATTERN={pattern}\n" if pattern else "")
        place = read_text(lines, kind="slurm").topology
        if place is not None:
            found = found.model_copy(update={"switches": place.switches, "blocks": place.blocks})
    return PREFIX + found.model_dump_json()


if __name__ == "__main__":
    sys.stdout.write(report() + "\n")
