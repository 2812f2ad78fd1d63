"""The state folder of a sandbox: its files, its lock, and what was asked for."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sandbox.errors import USER_INPUT, SandboxError
from sandbox.options import Options
from sandbox.packages import Programs

MAX_SOCKET_PATH = 107  # bytes in sockaddr_un, less the closing zero
LONGEST_SOCKET = "spool/n64/n64_4294967295.4294967295"


@dataclass(frozen=True)
class Saved:
    """Content of ``sandbox.json``."""

    options: Options
    controller_port: int
    node_ports: dict[str, int]
    programs: Programs


@dataclass(frozen=True)
class Folder:
    """Files of one sandbox."""

    path: Path

    @property
    def slurm_conf(self) -> Path:
        return self.path / "slurm.conf"

    @property
    def munge_key(self) -> Path:
        return self.path / "munge" / "key"

    @property
    def munge_socket(self) -> Path:
        return self.path / "munge" / "socket"

    @property
    def gpus(self) -> Path:
        """Links that stand for the GPUs' device files."""
        return self.path / "gpus"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def spool(self) -> Path:
        return self.path / "spool"

    @property
    def controller_state(self) -> Path:
        return self.path / "state"

    @property
    def json(self) -> Path:
        return self.path / "sandbox.json"

    @property
    def lock_file(self) -> Path:
        return self.path / "lock"

    def check(self) -> None:
        """Refuse folders that Slurm cannot use or that hold other things."""
        if not re.fullmatch(r"[A-Za-z0-9_./+@:-]+", str(self.path)):
            raise SandboxError(
                f"the state folder's path {str(self.path)!r} has characters that slurm.conf cannot hold",
                hint="use --state-dir with letters, digits and ./_+@:- only",
                exit_code=USER_INPUT,
            )
        if len(str(self.path / LONGEST_SOCKET).encode()) > MAX_SOCKET_PATH:
            raise SandboxError(
                f"the state folder's path {str(self.path)!r} is too long for a socket below it",
                hint=f"use --state-dir with at most {MAX_SOCKET_PATH - len(LONGEST_SOCKET) - 1} characters",
                exit_code=USER_INPUT,
            )
        try:
            ours = not self.path.exists() or self.is_ours()
        except FileNotFoundError:  # another `down` was faster
            ours = True
        if not ours:
            raise SandboxError(
                f"{self.path} exists and is not the state folder of a sandbox of this user",
                hint="name another folder with --state-dir",
                exit_code=USER_INPUT,
            )

    def is_ours(self) -> bool:
        """Whether the folder is a sandbox's (or was begun as one) and belongs to this user."""
        try:
            if self.path.is_symlink() or self.path.stat().st_uid != os.getuid():
                return False
            names = {entry.name for entry in self.path.iterdir()}
        except NotADirectoryError:
            return False
        return "sandbox.json" in names or names <= {"lock", "sandbox.json.new"}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder alone; makes it when missing.

        A holder may delete the folder, so the lock counts only if its file is still the one at that path.
        """
        while True:
            self._make()
            try:
                descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT, 0o600)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if self._is_lock(descriptor):
                    yield
                    return
            finally:
                os.close(descriptor)

    def _make(self) -> None:
        try:
            self.path.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            raise SandboxError(
                f"cannot make the state folder {self.path}: {error.strerror}", hint="name another with --state-dir"
            ) from error
        self.check()

    def _is_lock(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self.lock_file.stat())
        except FileNotFoundError:
            return False

    def save(self, saved: Saved) -> None:
        document = {
            "version": 1,
            "options": saved.options.to_json(),
            "controller_port": saved.controller_port,
            "node_ports": saved.node_ports,
            "programs": str(saved.programs.directory or ""),
            "plugins": str(saved.programs.plugins or ""),
        }
        new = self.json.with_name("sandbox.json.new")
        new.write_text(json.dumps(document, indent=2) + "\n")
        new.replace(self.json)

    def load(self) -> Saved | None:
        """Return what ``up`` saved, or None when it was never or only half begun."""
        try:
            data = json.loads(self.json.read_text())
            paths = [Path(value) if value else None for value in (data["programs"], data["plugins"])]
            options = Options.from_json(data["options"])
            return Saved(options, data["controller_port"], data["node_ports"], Programs(*paths))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def programs(self) -> Programs:
        """Return Slurm's programs that the sandbox runs; this machine's own when nothing is saved."""
        saved = self.load()
        return saved.programs if saved else Programs()

    def clear(self) -> None:
        """Delete everything but the lock; what marks the folder as ours goes last."""
        for path in self.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path not in (self.lock_file, self.json):
                path.unlink()
        self.json.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the folder; call it with the lock held."""
        self.clear()
        self.lock_file.unlink()
        self.path.rmdir()


def default_path(release: str = "") -> Path:
    """Folder in the user's runtime folder, else in /tmp under the user's number; one for each release."""
    suffix = f"-{release}" if release else ""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir() and os.access(runtime, os.W_OK):
        return Path(runtime) / f"hpjob-sandbox{suffix}"
    return Path("/tmp") / f"hpjob-sandbox-{os.getuid()}{suffix}"
