"""The ``checkpoints`` folder of a run: names, the commit by one rename, deletion. Rank 0's work.

::

    step-00000100/{data/,manifest.json,SHA256SUMS}   complete
    step-00000200.0003.partial/                      being written by attempt 3; a leftover of a crash otherwise
    step-00000050.trash/                             being deleted
    step-00000300.damaged/                           failed its checks; kept until a newer one is complete
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from hpjob.core.durable import sync_folder
from hpjob.core.run_dir import RunDir
from hpjob.runtime.checkpoint.manifest import (
    DATA_NAME,
    MANIFEST_NAME,
    SUMS_NAME,
    Kind,
    Manifest,
    manifest_text,
    read_manifest,
    sums_text,
)
from hpjob.runtime.checkpoint.retention import Retention

log = logging.getLogger(__name__)
_COMPLETE = re.compile(r"step-(\d{8,})")
_DAMAGED = re.compile(r"step-(\d{8,})\.damaged")
_PARTIAL = re.compile(r"step-\d{8,}\.(\d{4,})\.partial")


class CheckpointFolder:
    """Checkpoints of one run on a shared file system.

    Args:
        run_dir: The run.
        attempt: Which of its starts writes. A process of an earlier one that was frozen and goes on when nobody
            expects it any more then never writes into, empties or deletes what this one is writing.
    """

    def __init__(self, run_dir: RunDir, attempt: int = 0) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self.path = run_dir.checkpoints

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, newest first."""
        return sorted(self._matching(_COMPLETE), reverse=True)

    def complete(self, step: int) -> Path:
        """Return the folder of a complete checkpoint."""
        return self._run_dir.checkpoint(step)

    def partial(self, step: int) -> Path:
        """Return the folder that a checkpoint is written to."""
        return self._with_suffix(step, f".{self._attempt:04d}.partial")

    def clean_leftovers(self) -> list[str]:
        """Delete what a crash left half written or half deleted; return the names.

        What cannot be deleted, because somebody still writes there, is in nobody's way: the next start tries again.
        """
        if not self.path.is_dir():
            return []
        found = sorted(path for path in self.path.iterdir() if self._is_leftover(path))
        for path in found:
            shutil.rmtree(path, ignore_errors=True)
        kept = [path for path in found if path.exists()]
        if kept:
            log.warning("could not be deleted: %s", ", ".join(map(str, kept)))
        return [path.name for path in found if path not in kept]

    def _is_leftover(self, path: Path) -> bool:
        partial = _PARTIAL.fullmatch(path.name)
        if partial is not None:
            return int(partial[1]) <= self._attempt
        return path.suffix in (".partial", ".trash")

    def begin(self, step: int) -> None:
        """Make an empty partial folder."""
        shutil.rmtree(self.partial(step), ignore_errors=True)
        (self.partial(step) / DATA_NAME).mkdir(parents=True)

    def abandon(self, step: int) -> None:
        """Delete the partial folder of a save that failed."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def free_mib(self) -> int | None:
        """Return the free space of the file system, rounded down; None when the folder is lost."""
        try:
            return shutil.disk_usage(self._run_dir.path).free >> 20
        except OSError:
            return None

    def commit(self, manifest: Manifest) -> None:
        """Make a written checkpoint durable and give it its name with one rename.

        Raises:
            OSError: It has no name then, or lost it again.
        """
        partial = self.partial(manifest.step)
        content = manifest_text(manifest)
        _write_durably(partial / MANIFEST_NAME, content)
        _write_durably(partial / SUMS_NAME, sums_text(content.encode(), manifest))
        sync_folder(partial / DATA_NAME)
        sync_folder(partial)
        complete = self.complete(manifest.step)
        partial.rename(complete)
        try:
            sync_folder(self.path)
        except OSError:
            # Nobody can say whether the name would survive a crash: better none than one that may go.
            complete.rename(partial)
            raise

    def read(self, step: int) -> Manifest:
        """Read the manifest of a complete checkpoint.

        Raises:
            OSError: It cannot be read.
            ValueError: It holds something else.
        """
        return read_manifest(self.complete(step), step)

    def delete_superfluous(self, retention: Retention, verified: int) -> list[int]:
        """Delete old checkpoints; return their steps.

        Args:
            retention: What stays.
            verified: Step of a newer one that was read back.

        Raises:
            OSError: One cannot be deleted; those after it stay too.
        """
        kinds = {step: kind for step in self.steps() if (kind := self._kind(step)) is not None}
        old = retention.superfluous(kinds, verified)
        for step in old:
            self._delete(self.complete(step), self._with_suffix(step, ".trash"))
        for step in self._matching(_DAMAGED):
            if step <= verified:
                self._delete(self._with_suffix(step, ".damaged"), self._with_suffix(step, ".trash"))
        return old

    def set_aside(self, step: int) -> None:
        """Rename a damaged checkpoint so that it is not tried again and its step can be saved anew."""
        target = self._with_suffix(step, ".damaged")
        shutil.rmtree(target, ignore_errors=True)
        self.complete(step).rename(target)
        sync_folder(self.path)

    def _kind(self, step: int) -> Kind | None:
        """Return the kind of a checkpoint; None when its manifest is damaged, which a resume looks into."""
        try:
            return self.read(step).kind
        except (OSError, ValueError):
            return None

    def _delete(self, path: Path, trash: Path) -> None:
        # The rename makes it vanish at once; a crash while deleting leaves no half checkpoint.
        shutil.rmtree(trash, ignore_errors=True)
        path.rename(trash)
        sync_folder(self.path)
        shutil.rmtree(trash)

    def _with_suffix(self, step: int, suffix: str) -> Path:
        complete = self.complete(step)
        return complete.with_name(complete.name + suffix)

    def _matching(self, pattern: re.Pattern[str]) -> list[int]:
        if not self.path.is_dir():
            return []
        return [int(match[1]) for path in self.path.iterdir() if (match := pattern.fullmatch(path.name))]


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
