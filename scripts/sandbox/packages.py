"""Slurm's programs: where they are, and Debian's packages when they are missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from sandbox.errors import SandboxError

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sinfo", "scontrol", "srun", "sbatch")
SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])


def program(name: str) -> str:
    """Return the full path of one of Slurm's programs.

    Raises:
        SandboxError: It is not installed.
    """
    path = shutil.which(name, path=SEARCH_PATH)
    if path is None:
        raise SandboxError(f"`{name}` is not installed", hint=f"as root: apt-get install {' '.join(PACKAGES)}")
    return path


def install_missing() -> None:
    """Install Slurm by apt-get when a program is missing.

    Raises:
        SandboxError: Not root, no apt-get, or apt-get failed.
    """
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCH_PATH) is None]
    if not missing:
        return
    command = f"apt-get install --no-install-recommends {' '.join(PACKAGES)}"
    if shutil.which("apt-get", path=SEARCH_PATH) is None:
        raise SandboxError(
            f"Slurm is not installed (missing: {', '.join(missing)}) and this is no Debian",
            hint="install slurmctld, slurmd, Slurm's client commands and munge of your system",
        )
    if os.geteuid() != 0:
        raise SandboxError(
            f"Slurm is not installed (missing: {', '.join(missing)}) and only root can install it",
            hint=f"sudo apt-get update && sudo {command}",
        )
    print("installing Debian's Slurm packages …", file=sys.stderr)
    for arguments in (["update"], ["install", "--yes", "--no-install-recommends", *PACKAGES]):
        _apt_get(arguments)


def _apt_get(arguments: list[str]) -> None:
    done = subprocess.run(
        ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", *arguments],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SandboxError(
            f"apt-get {arguments[0]} failed:\n{done.stdout.strip()[-2000:]}",
            hint=f"repair it, then: apt-get install {' '.join(PACKAGES)}",
        )
