"""What one rank finds out about its own node before training: device, memory, file system, versions, clock."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import torch

import hpjob
from hpjob.core.durable import sync_folder

_GIB = 1 << 30
_VISIBLE_WITHIN_S = 20.0
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """One rank's findings; a problem is a sentence, None = none."""

    rank: int
    node: str
    device: str
    """``cpu`` or ``cuda``."""
    device_problem: str | None = None
    free_gib: float | None = None
    total_gib: float | None = None
    """Of the GPU; None on a CPU."""
    file_problem: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    clock: float = 0.0
    """Seconds since the epoch when rank 0's request arrived."""

    def dump(self) -> str:
        """Return the report as text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> NodeReport:
        """Read what :meth:`dump` wrote."""
        return cls(**json.loads(text))


def versions() -> dict[str, str]:
    """Return what has to be the same on all nodes."""
    found = {"hpjob": hpjob.__version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("transformers", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def check_device(device: torch.device) -> str | None:
    """Compute something on a device; return what is wrong with it."""
    try:
        ones = torch.ones((128, 128), device=device)
        total = float((ones @ ones).sum().item())
    except RuntimeError as error:
        return f"{device} does not work: {str(error).strip().splitlines()[0]}"
    return None if total == 128.0**3 else f"{device} computes wrong: {total} instead of {128.0**3}"


def free_memory_gib(device: torch.device) -> tuple[float | None, float | None]:
    """Return free and total memory of a GPU; nothing for a CPU, whose memory is shared and pageable."""
    if device.type != "cuda":
        return None, None
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:
        return None, None
    return free / _GIB, total / _GIB


def write_probe(folder: Path, node: str) -> str | None:
    """Write a small file durably where all nodes should see it; return what went wrong."""
    try:
        folder.mkdir(exist_ok=True)
        with (folder / node).open("w", encoding="utf-8") as stream:
            stream.write(node)
            stream.flush()
            os.fsync(stream.fileno())
        sync_folder(folder)
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror or error}"
    return None


def find_probe(
    folder: Path, node: str, *, within_s: float = _VISIBLE_WITHIN_S, sleep: Callable[[float], None] = time.sleep
) -> str | None:
    """Wait until another node's file is visible here; return what is wrong when it does not come."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            if (folder / node).read_text(encoding="utf-8") == node:
                return None
            problem = "is damaged"
        except OSError as error:
            problem = (error.strerror or str(error)).lower()
        if time.monotonic() > deadline:
            return f"a file that {node} wrote to {folder} is not seen here ({problem})"
        sleep(_POLL_S)
