"""Azure: ``sharp_cmd topology``, which groups the port GUIDs by switch; hosts cannot be counted from it."""

from __future__ import annotations

import re

from hpjob.topology.read.cloud_facts import CloudHosts, cloud_reading, is_elided
from hpjob.topology.read.reading import Reader, Reading
from hpjob.topology.read.text import Source

TITLE = "Azure switch list"
_LINE = re.compile(r"SwitchName=(\S+)\s+(?:Switches=\S+\s+)?Nodes=(0x[0-9a-fA-F]{12,16}(?:,0x[0-9a-fA-F]{1,16})*)")


def confidence(source: Source) -> float:
    """High when a switch lists port GUIDs where Slurm would list nodes."""
    return 0.95 if "SwitchName=" in source.text and _LINE.search(source.text) else 0.0


def read(source: Source) -> Reading:
    """Read every line."""
    found = CloudHosts("azure", "port_guid", countable=False, complete=not is_elided(source.text))
    for match in _LINE.finditer(source.text):
        for guid in match[2].split(","):
            found.layers[guid] = [match[1]]
    return cloud_reading(found, TITLE, ("ports, not hosts, are listed",))


READER = Reader(kind="cloud", title=TITLE, confidence=confidence, read=read)
