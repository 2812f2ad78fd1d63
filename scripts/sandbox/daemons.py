"""Writes the files of a sandbox, starts its daemons, and waits until Slurm answers."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import time
from pathlib import Path

from sandbox import config
from sandbox.errors import SandboxError
from sandbox.folder import Folder, Saved
from sandbox.options import Options
from sandbox.packages import Programs
from sandbox.processes import MARK

PORTS = range(20_000, 32_000)  # below Linux's range for outgoing connections
FOREIGN_PREFIXES = ("SLURM", "SBATCH_", "SALLOC_", "SRUN_", "SQUEUE_", "SINFO_", "SCANCEL_", "MUNGE")


def environment(folder: Folder) -> dict[str, str]:
    """Return this process's environment for Slurm's programs, free of other Slurm settings."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN_PREFIXES)}
    return {**kept, "PATH": folder.programs().search_path, "SLURM_CONF": str(folder.slurm_conf), MARK: str(folder.path)}


def choose_ports(options: Options, programs: Programs) -> Saved:
    """Give the controller and each node a port that nobody listens on."""
    free = iter(random.sample(PORTS, len(PORTS)))
    ports = [next(port for port in free if _is_free(port)) for _ in range(options.nodes + 1)]
    return Saved(options, ports[0], dict(zip(options.node_names(), ports[1:], strict=True)), programs)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
        return True


def write_files(folder: Folder, saved: Saved) -> None:
    """Write everything that the daemons read; ``folder`` holds nothing but its lock."""
    folder.save(saved)
    for path in (folder.log, folder.spool, folder.gpus):
        path.mkdir(mode=0o755)
    folder.controller_state.mkdir(mode=0o700)
    folder.munge_key.parent.mkdir(mode=0o755)
    folder.munge_key.touch(mode=0o600)
    folder.munge_key.write_bytes(os.urandom(128))
    for index in range(saved.options.gpus):
        (folder.gpus / f"nvidia{index}").symlink_to("/dev/null")
    (folder.path / "gres.conf").write_text(config.gres_conf(folder, saved.options))
    (folder.path / "topology.conf").write_text(config.topology_conf(saved.options))
    if (text := config.cgroup_conf(saved.programs)) is not None:
        (folder.path / "cgroup.conf").write_text(text)
    folder.slurm_conf.write_text(config.slurm_conf(folder, saved))


def start_munge(folder: Folder) -> None:
    """Start the sandbox's own munged and wait until it answers."""
    directory = folder.munge_key.parent
    child = _spawn(
        folder,
        "munged",
        [
            folder.programs().path("munged"),
            "--foreground",
            "--force",
            f"--socket={folder.munge_socket}",
            f"--key-file={folder.munge_key}",
            f"--log-file={directory}/munged.log",
            f"--pid-file={directory}/pid",
            f"--seed-file={directory}/seed",
        ],
    )
    until = time.monotonic() + 120
    while not _accepts(folder.munge_socket):
        if child.poll() is not None or time.monotonic() > until:
            raise SandboxError(
                f"munged did not start:\n{tail(folder.log / 'munged.out')}",
                hint=f"every folder above {directory} has to belong to root or you and be closed to others' writing",
            )
        time.sleep(0.02)


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
        return True


def start_controller(folder: Folder) -> subprocess.Popen[bytes]:
    """Start slurmctld; it keeps running when this process ends."""
    return _spawn(folder, "slurmctld", [folder.programs().path("slurmctld"), "-D", "-f", str(folder.slurm_conf)])


def start_node(folder: Folder, name: str) -> subprocess.Popen[bytes]:
    """Start slurmd of one virtual node; it keeps running when this process ends."""
    programs = folder.programs()
    # slurmd's own idea of where its step daemon lies is that of an installed package.
    step_daemon = ["-d", programs.path("slurmstepd")] if programs.directory else []
    command = [programs.path("slurmd"), "-D", "-N", name, "-f", str(folder.slurm_conf), *step_daemon]
    return _spawn(folder, f"slurmd.{name}", command)


def _spawn(folder: Folder, name: str, command: list[str]) -> subprocess.Popen[bytes]:
    """Start a daemon in its own session with the folder as working directory."""
    with (folder.log / f"{name}.out").open("ab") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(folder),
            cwd=folder.path,
            start_new_session=True,
        )


def node_states(folder: Folder, *, patience: float = 60.0) -> dict[str, str]:
    """Return the controller's state of each node as ``sinfo`` abbreviates it; empty when it does not answer."""
    command = [folder.programs().path("sinfo"), "--noheader", "--Node", "--partition=batch", "--format=%N %t"]
    try:
        done = subprocess.run(
            command, env=environment(folder), capture_output=True, text=True, check=False, timeout=patience
        )
    except subprocess.TimeoutExpired:
        return {}
    lines = [line.split() for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return {line[0]: line[1] for line in lines if len(line) == 2}


def is_ready(state: str) -> bool:
    """Whether a node in this state of ``sinfo`` has registered and answers; ``*`` means that it does not."""
    return not state.endswith("*") and not state.startswith(("unk", "down"))


def wait_ready(folder: Folder, names: list[str], started: dict[str, subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait until the controller reports these nodes as ready.

    Args:
        started: Daemons started just now; one that ends meanwhile is an error at once.

    Raises:
        SandboxError: A daemon ended or the time is over, with the last lines of its log.
    """
    until = time.monotonic() + seconds
    while True:
        dead = [name for name, child in started.items() if child.poll() is not None]
        if dead:
            raise SandboxError(
                "\n".join(f"{name} ended at once:\n{_logs(folder, name)}" for name in dead),
                hint="look at the lines given with --conf first; the log above says what Slurm minds",
            )
        states = node_states(folder)
        missing = [name for name in names if not is_ready(states.get(name, "unknown"))]
        if not missing:
            return
        if time.monotonic() > until:
            raise SandboxError(
                f"not ready after {seconds:.0f} s: {', '.join(missing)}\n{_logs(folder, 'slurmctld')}",
                hint=f"logs are in {folder.log}",
            )
        time.sleep(0.1)


def _logs(folder: Folder, name: str) -> str:
    return "\n".join(filter(None, (tail(folder.log / f"{name}.log"), tail(folder.log / f"{name}.out", 5))))


def tail(path: Path, lines: int = 12) -> str:
    """Return the last lines of a log, empty when there is none."""
    with contextlib.suppress(OSError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    return ""
