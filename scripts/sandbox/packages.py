"""Slurm's programs: where they are, and Debian's packages when they are missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox.errors import SandboxError

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sinfo", "scontrol", "srun", "sbatch")
HOST_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])


@dataclass(frozen=True)
class Programs:
    """Slurm's programs of one sandbox.

    Attributes:
        directory: Folder of another release's programs; None = this machine's own, found on PATH.
        plugins: Their plugins; None = where the programs look by themselves.
    """

    directory: Path | None = None
    plugins: Path | None = None

    @property
    def search_path(self) -> str:
        """PATH whose first hits are these programs."""
        return os.pathsep.join([str(self.directory), HOST_PATH]) if self.directory else HOST_PATH

    def path(self, name: str) -> str:
        """Return the full path of one of Slurm's programs.

        Raises:
            SandboxError: It is not installed.
        """
        path = shutil.which(name, path=str(self.directory) if self.directory else HOST_PATH)
        if path is None:
            hint = (
                f"was {self.directory} deleted while the sandbox ran? end it with `scripts/slurm-sandbox down`"
                if self.directory
                else f"as root: apt-get install {' '.join(PACKAGES)}"
            )
            raise SandboxError(f"`{name}` is not installed", hint=hint)
        return path

    def version(self) -> str | None:
        """Return Slurm's version; None when its programs are gone."""
        try:
            done = subprocess.run([self.path("slurmd"), "-V"], capture_output=True, text=True, check=False)
        except (SandboxError, OSError):
            return None
        return done.stdout.split()[-1] if done.stdout.split() else None

    def release_number(self) -> tuple[int, int]:
        """Return the version's first two numbers, such as (24, 11); zeros when they are not known."""
        match = re.match(r"(\d+)\.(\d+)", self.version() or "")
        return (int(match[1]), int(match[2])) if match else (0, 0)


def install_missing() -> None:
    """Install this machine's own Slurm by apt-get when a program is missing.

    Raises:
        SandboxError: Not root, no apt-get, or apt-get failed.
    """
    missing = [name for name in PROGRAMS if shutil.which(name, path=HOST_PATH) is None]
    if not missing:
        return
    command = f"apt-get install --no-install-recommends {' '.join(PACKAGES)}"
    if shutil.which("apt-get", path=HOST_PATH) is None:
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
        apt_get(arguments, hint=f"repair it, then: apt-get install {' '.join(PACKAGES)}")


def apt_get(arguments: Sequence[str], *, hint: str) -> None:
    """Run apt-get without questions.

    Raises:
        SandboxError: It failed; the message holds its last lines.
    """
    done = subprocess.run(
        ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", *arguments],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        name = next((word for word in arguments if word in ("update", "install")), "")
        raise SandboxError(f"apt-get {name} failed:\n{done.stdout.strip()[-2000:]}", hint=hint)
