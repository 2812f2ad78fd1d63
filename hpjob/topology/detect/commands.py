"""Tools asked for their text: the fallback where a library is missing, and a second opinion where it is not."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from hpjob.core.errors import HpjobError
from hpjob.topology.model import Topology
from hpjob.topology.read.recognise import read_bytes

TIMEOUT_S = 20


@dataclass(frozen=True, slots=True)
class Tool:
    """One command whose output a reader knows."""

    command: tuple[str, ...]
    kind: str
    instead: tuple[str, ...] = ()
    """Asked where the command is not on the PATH."""


NODE_TOOLS = (
    Tool(("nvidia-smi", "topo", "-m"), "nvsmi_topo"),
    Tool(("nvidia-smi", "-L"), "nvsmi_list"),
    Tool(("rocm-smi", "--showtopo"), "rocm", instead=("amd-smi", "topology")),
    Tool(("ibstat",), "ibstat"),
    Tool(("ibdev2netdev",), "ibdev2netdev"),
)
SLURM_TOOLS = (
    Tool(("scontrol", "show", "node"), "slurm_nodes"),
    Tool(("scontrol", "show", "topology"), "slurm"),
)


def ask(tool: Tool) -> tuple[Topology | None, str | None]:
    """Run a tool and read its output.

    Returns:
        The topology, or None and the reason why there is none.
    """
    command = next((c for c in (tool.command, tool.instead) if c and shutil.which(c[0])), None)
    if command is None:
        return None, f"{tool.command[0]} is not on the PATH"
    name = " ".join(command)
    # A site may cut long lines of scontrol through this variable.
    environment = {key: value for key, value in os.environ.items() if key != "SLURM_TOPO_LEN"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"`{name}` did not answer: {error}"
    if not done.stdout.strip():
        detail = done.stderr.decode(errors="replace").strip().splitlines()
        return None, f"`{name}` printed nothing: {detail[0][:160] if detail else f'exit code {done.returncode}'}"
    try:
        return read_bytes(done.stdout, kind=tool.kind, name=name).topology, None
    except HpjobError as error:
        return None, error.message
