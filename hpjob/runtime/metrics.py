"""``metrics.jsonl``: one line a step over all attempts; no step twice, none missing."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path

from hpjob.core.durable import sync_folder
from hpjob.core.run_records import write_text_atomically

log = logging.getLogger(__name__)


class MetricsLog:
    """Appends lines; a line that cannot be written now (disk full) is kept and tried again.

    Args:
        path: ``metrics.jsonl`` of the run.
        last_step: Step of the checkpoint that training goes on from; later lines are dropped,
            because their steps will be done again.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self.num_dropped = drop_steps_after(path, last_step)
        """Whole steps that were dropped."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sync_folder(path.parent)
        self._pending = b""
        self._lock = threading.Lock()

    def append(self, line: dict[str, object]) -> None:
        """Add one line; floats keep all their digits."""
        with self._lock:
            had_pending = bool(self._pending)
            self._pending += (json.dumps(line) + "\n").encode()
        try:
            self._write()
        except OSError as error:
            if not had_pending:
                log.warning("metrics cannot be written (%s); lines are kept and tried again", error.strerror)

    def sync(self) -> None:
        """Make all lines durable; a checkpoint of their step may be committed only then.

        Saves call this in their own thread; lines can be appended meanwhile.

        Raises:
            OSError: They cannot be written.
        """
        self._write()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Write what is pending and close the file."""
        try:
            self.sync()
        finally:
            os.close(self._descriptor)

    def _write(self) -> None:
        # A short write before an error leaves the rest of its line pending, which follows later.
        with self._lock:
            while self._pending:
                count = os.write(self._descriptor, self._pending)
                self._pending = self._pending[count:]


def drop_steps_after(path: Path, last_step: int) -> int:
    """Rewrite the file without the lines of later steps and without a torn last line.

    Returns:
        The number of steps dropped, without a torn line.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    kept = [line for line in lines if _is_kept(line, last_step)]
    if len(kept) != len(lines):
        write_text_atomically(path, "".join(kept))
        sync_folder(path.parent)
    return sum(line.endswith("\n") for line in lines) - sum(line.endswith("\n") for line in kept)


def _is_kept(line: str, last_step: int) -> bool:
    try:
        step = int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return False
    return line.endswith("\n") and 0 < step <= last_step
