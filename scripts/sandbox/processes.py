"""Finds and ends the processes of one sandbox, and only those.

Nothing is trusted that could be stale: a daemon is recognised by its own command line, which names a file of the
state folder, a step daemon by the log that it writes, and a job's process by the environment that it was given. A
person's shell after ``eval "$(slurm-sandbox env)"`` has SLURM_CONF too, but no SLURMD_NODENAME, so it is left alone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from sandbox.folder import Folder

DAEMONS = ("slurmctld", "slurmd", "munged")
MARK = "SLURM_SANDBOX_STATE_DIR"  # in the environment of all that the sandbox itself starts


@dataclass(frozen=True)
class Process:
    """One running process.

    Attributes:
        start: Clock ticks from boot to its start; with the pid it names one process for good.
        kind: ``slurmctld``, ``slurmd``, ``munged``, ``helper`` for what slurmctld or a killed command of ours has left,
            or ``job`` for a step daemon and all that a job started.
        node: Virtual node, empty for slurmctld and munged.
    """

    pid: int
    parent: int
    start: int
    kind: str = ""
    node: str = ""

    def is_alive(self) -> bool:
        now = _read(self.pid)
        return now is not None and now.start == self.start

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the pid belongs to another process by now."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return
        try:
            if self.is_alive():
                signal.pidfd_send_signal(descriptor, number)
        except (ProcessLookupError, PermissionError):
            return
        finally:
            os.close(descriptor)


def find(folder: Folder) -> list[Process]:
    """Return the sandbox's processes, daemons and jobs; never the calling process or what it was started from."""
    everything = {process.pid: process for process in map(_read, _pids()) if process is not None}
    ours: dict[int, Process] = {}
    for process in everything.values():
        kind, node = _identify(process.pid, folder)
        if kind:
            ours[process.pid] = Process(process.pid, process.parent, process.start, kind, node)
    children: dict[int, list[Process]] = {}
    for process in everything.values():
        children.setdefault(process.parent, []).append(process)
    unseen = list(ours.values())
    while unseen:
        above = unseen.pop()
        for process in children.get(above.pid, []):
            if process.pid not in ours:
                kind = "helper" if above.kind in ("slurmctld", "munged", "helper") else "job"
                ours[process.pid] = Process(process.pid, process.parent, process.start, kind, above.node)
                unseen.append(ours[process.pid])
    pid = os.getpid()
    while pid in everything:
        ours.pop(pid, None)
        pid = everything[pid].parent
    return sorted(ours.values(), key=lambda process: process.pid)


def end(
    found: Callable[[], Iterable[Process]], *, first: signal.Signals = signal.SIGTERM, patience: float = 5.0
) -> bool:
    """End all processes that ``found`` returns until it returns none.

    Args:
        found: Called again and again, since processes may start others meanwhile.
        first: Signal to begin with; after ``patience`` seconds it is SIGKILL.

    Returns:
        Whether none is left.
    """
    begun = time.monotonic()
    told: set[tuple[int, int]] = set()
    while processes := list(found()):
        waited = time.monotonic() - begun
        if waited > patience + 60:
            return False
        for process in processes:
            if waited > patience:
                process.send(signal.SIGKILL)
            elif (process.pid, process.start) not in told:
                process.send(first)
                told.add((process.pid, process.start))
        time.sleep(0.05)
    return True


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _read(pid: int) -> Process | None:
    """Parent and start time of a process; None when it is gone or only waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    values = stat.rpartition(")")[2].split()
    return None if values[0] in "ZX" else Process(pid, int(values[1]), int(values[19]))


def _strings(pid: int, name: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _identify(pid: int, folder: Folder) -> tuple[str, str]:
    """Return kind and node of a process of the sandbox, else two empty texts."""
    arguments = _strings(pid, "cmdline")
    name = Path(arguments[0]).name if arguments else ""
    conf = str(folder.slurm_conf)
    if name == "munged" and f"--key-file={folder.munge_key}" in arguments:
        return "munged", ""
    if name in ("slurmctld", "slurmd") and conf in arguments:
        return name, arguments[arguments.index("-N") + 1] if "-N" in arguments else ""
    # Daemons that show a title have overwritten their environment with it in newer releases of Slurm.
    if name.startswith(("slurmstepd:", "slurmctld:")):
        log = _own_log(pid, folder)
        kind = "" if log is None else "job" if name.startswith("slurmstepd:") else "helper"
        return kind, (log or "").removeprefix("slurmd.") if kind == "job" else ""
    environment = _strings(pid, "environ")
    if f"SLURM_CONF={conf}" not in environment:
        return "", ""
    if f"{MARK}={folder.path}" in environment:
        return "helper", ""
    nodes = [entry.partition("=")[2] for entry in environment if entry.startswith("SLURMD_NODENAME=")]
    return ("job", nodes[0]) if nodes else ("", "")


def _own_log(pid: int, folder: Folder) -> str | None:
    """Name, without ``.log``, of the sandbox's log that a process writes to; None = to none."""
    try:
        targets = [str(link.readlink()).removesuffix(" (deleted)") for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return None
    prefix, suffix = f"{folder.log}/", ".log"
    return next((t[len(prefix) : -len(suffix)] for t in targets if t.startswith(prefix) and t.endswith(suffix)), None)
