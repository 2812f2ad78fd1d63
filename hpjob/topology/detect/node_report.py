"""``python -m hpjob.topology.detect.node_report``: one line of JSON about this node, for a step over many nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from hpjob.topology.detect.node import detect_node
from hpjob.topology.model import Topology
from hpjob.topology.read.recognise import read_text

PREFIX = "hpjob-topology:"


def report() -> str:
    """Return the line: a prefix that other output of a site's prolog cannot be taken for, then JSON."""
    found = own_gpus(detect_node(), os.environ)
    addr = os.environ.get("SLURM_TOPOLOGY_ADDR")
    if addr:
        pattern = os.environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
        lines = f"SLURM_TOPOLOGY_ADDR={addr}\n" + (f"SLURM_TOPOLOGY_ADDR_PATTERN={pattern}\n" if pattern else "")
        place = read_text(lines, kind="slurm").topology
        if place is not None:
            found = found.model_copy(update={"switches": place.switches, "blocks": place.blocks})
    return PREFIX + found.model_dump_json()


def own_gpus(found: Topology, env: Mapping[str, str]) -> Topology:
    """Keep the GPUs that Slurm gave to the job, where the driver shows all of the node."""
    words = (env.get("SLURM_STEP_GPUS") or env.get("SLURM_JOB_GPUS") or "").split(",")
    node = found.nodes[0]
    own = {int(word) for word in words if word.isdecimal()}
    if len(own) != len(words) or len(own) >= len(node.gpus) or not own <= {gpu.index for gpu in node.gpus}:
        return found
    kept = node.model_copy(update={"gpus": tuple(gpu for gpu in node.gpus if gpu.index in own)})
    note = f"{len(own)} of {len(node.gpus)} GPUs belong to the job"
    return found.model_copy(update={"nodes": (kept, *found.nodes[1:]), "notes": (*found.notes, note)})


if __name__ == "__main__":
    sys.stdout.write(report() + "\n")
