"""What the commands do: start, stop, repair and describe a sandbox."""

from __future__ import annotations

import difflib
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sandbox import daemons
from sandbox.errors import USER_INPUT, SandboxError
from sandbox.folder import Folder, Saved
from sandbox.options import Options
from sandbox.packages import Programs
from sandbox.processes import Process, end, find
from sandbox.release import programs_of

START_SECONDS = 180.0
ATTEMPTS = 3


def up(folder: Folder, options: Options, cache: Path) -> str:
    """Start a sandbox, or repair the one that runs; returns what was done.

    Args:
        cache: Folder for the programs of another release.

    Raises:
        SandboxError: Wrong options, missing packages, other options than the running sandbox's, or no start.
    """
    options.check()
    programs = programs_of(options.release, cache)
    if options.topology == "block" and programs.release_number() < (23, 11):
        raise SandboxError(
            f"Slurm {programs.version()} has no block topology",
            hint="add --release trixie for a newer Slurm, or use --topology tree",
            exit_code=USER_INPUT,
        )
    with folder.locked():
        saved = folder.load()
        alive = [process for process in find(folder) if process.kind in ("slurmctld", "slurmd")]
        if saved is None or not alive:
            _start_fresh(folder, options, programs)
            return "started"
        if differences := saved.options.differences(options):
            raise SandboxError(
                f"a sandbox with other options runs in {folder.path}; you asked for {', '.join(differences)}",
                hint="end it with `scripts/slurm-sandbox down`, or start another with --state-dir",
                exit_code=USER_INPUT,
            )
        return "repaired" if _start_missing(folder, saved) else "already running"


def _start_fresh(folder: Folder, options: Options, programs: Programs) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        _end_all(folder)
        folder.clear()
        try:
            saved = daemons.choose_ports(options, programs)
            daemons.write_files(folder, saved)
            _start_missing(folder, saved)
            return
        except SandboxError as error:
            taken = "Address already in use" in error.message
            _end_all(folder)
            if taken and attempt < ATTEMPTS:
                continue  # somebody took a port between our look and the daemon's start
            folder.remove()
            raise
        except BaseException:
            _end_all(folder)
            folder.remove()
            raise


def _start_missing(folder: Folder, saved: Saved) -> bool:
    """Start the daemons that do not run; returns whether there were any."""
    processes = find(folder)
    kinds = {process.kind for process in processes}
    running_nodes = {process.node for process in processes if process.kind == "slurmd"}
    started: dict[str, subprocess.Popen[bytes]] = {}
    if "munged" not in kinds:
        daemons.start_munge(folder)
    if "slurmctld" not in kinds:
        started["slurmctld"] = daemons.start_controller(folder)
    for name in saved.options.node_names():
        if name not in running_nodes:
            started[f"slurmd.{name}"] = daemons.start_node(folder, name)
    daemons.wait_ready(folder, saved.options.node_names(), started, START_SECONDS)
    return bool(started) or "munged" not in kinds


def down(folder: Folder) -> bool:
    """End a sandbox and delete its folder; returns whether there was anything."""
    folder.check()
    if not folder.path.exists():
        found = bool(find(folder))
        _end_all(folder)
        return found
    with folder.locked():
        _end_all(folder)
        folder.remove()
    return True


def _end_all(folder: Folder) -> None:
    """End daemons before jobs, so that none requeues or starts one, and munged last."""
    steps: tuple[tuple[Callable[[], Iterable[Process]], signal.Signals], ...] = (
        (lambda: _of_kind(folder, "slurmctld"), signal.SIGTERM),
        (lambda: _of_kind(folder, "slurmd"), signal.SIGTERM),
        (lambda: _of_kind(folder, "job"), signal.SIGKILL),
        (lambda: find(folder), signal.SIGTERM),
    )
    for found, number in steps:
        if not end(found, first=number):
            left = ", ".join(f"{process.pid} ({process.kind})" for process in found())
            raise SandboxError(f"these processes do not end: {left}", hint="are they stuck in the kernel? see `ps -l`")


def _of_kind(folder: Folder, kind: str) -> list[Process]:
    return [process for process in find(folder) if process.kind == kind]


def restart_controller(folder: Folder) -> None:
    """End slurmctld and start it again; nodes and jobs go on meanwhile."""
    with _running(folder) as saved:
        end(lambda: _of_kind(folder, "slurmctld"))
        child = daemons.start_controller(folder)
        names = {process.node for process in _of_kind(folder, "slurmd")}
        daemons.wait_ready(folder, sorted(names & set(saved.options.node_names())), {"slurmctld": child}, START_SECONDS)


def stop_node(folder: Folder, name: str, *, with_jobs: bool) -> None:
    """End one node's slurmd at once.

    Args:
        with_jobs: End the job steps on the node too, as when it loses power; else they run on.
    """
    with _running(folder, name):
        kinds = ("slurmd", "job") if with_jobs else ("slurmd",)
        end(
            lambda: [process for process in find(folder) if process.node == name and process.kind in kinds],
            first=signal.SIGKILL,
        )


def start_node(folder: Folder, name: str) -> None:
    """Start one node's slurmd and wait until the node is ready."""
    with _running(folder, name):
        running = {process.node for process in _of_kind(folder, "slurmd")}
        started = {} if name in running else {f"slurmd.{name}": daemons.start_node(folder, name)}
        daemons.wait_ready(folder, [name], started, START_SECONDS)


@contextmanager
def _running(folder: Folder, node: str = "") -> Iterator[Saved]:
    """Hold the folder of a sandbox that runs, and check the name of a node of it."""
    folder.check()
    saved = folder.load()
    if saved is None:
        raise SandboxError(f"no sandbox runs in {folder.path}", hint="start one with `scripts/slurm-sandbox up`")
    names = saved.options.node_names()
    if node and node not in names:
        nearest = difflib.get_close_matches(node, names, n=1, cutoff=0.0)[0]
        raise SandboxError(
            f"the sandbox has no node {node!r}",
            hint=f"did you mean {nearest}? It has {names[0]} to {names[-1]}",
            exit_code=USER_INPUT,
        )
    with folder.locked():
        yield saved


def exports(folder: Folder) -> list[str]:
    """Return shell lines that point Slurm's commands at the sandbox."""
    with _running(folder) as saved:
        stale = sorted(key for key in os.environ if key in ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_HOSTFILE"))
        own = saved.programs.directory
        path = [f'export PATH={own}:"${{PATH#{own}:}}"'] if own else []
        return [f"export SLURM_CONF={folder.slurm_conf}", *path, *(f"unset {key}" for key in stale)]
