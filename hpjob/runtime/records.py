"""What rank 0 writes about an attempt: events, metrics, outcome, FINISHED. Other ranks write nothing."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict

from hpjob.core.durable import sync_folder
from hpjob.core.run_records import Outcome, append_json_line, write_json
from hpjob.runtime.metrics import MetricsLog
from hpjob.runtime.rank import Rank

log = logging.getLogger(__name__)


class AttemptRecords:
    """Files of one attempt, as far as rank 0 writes them."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._metrics: MetricsLog | None = None

    @property
    def _active(self) -> bool:
        return self._rank.rank == 0

    def event(self, name: str, **details: object) -> None:
        """Append to ``events.jsonl``; a full disk costs the line, not the run."""
        if not self._active:
            return
        try:
            append_json_line(self._rank.attempt.events, {"time": time.time(), "event": name, **details})
        except OSError as error:
            log.warning("event %s could not be written: %s", name, error)

    def open_metrics(self, last_step: int) -> int:
        """Drop the lines of steps that will be done again and go on after them; return how many steps these are."""
        if not self._active:
            return 0
        self._metrics = MetricsLog(self._rank.run_dir.metrics, last_step)
        return self._metrics.num_dropped

    def metrics(self, line: dict[str, object]) -> None:
        """Append the line of one step."""
        if self._metrics is not None:
            self._metrics.append(line)

    def sync_metrics(self) -> None:
        """Make the lines so far durable; any thread may call this.

        Raises:
            OSError: They cannot be written.
        """
        if self._metrics is not None:
            self._metrics.sync()

    def outcome(self, outcome: Outcome) -> None:
        """Write why the ranks leave."""
        if not self._active:
            return
        write_json(self._rank.attempt.outcome, asdict(outcome))
        sync_folder(self._rank.attempt.path)

    def finished(self, step: int) -> None:
        """Write FINISHED, after which no attempt starts training again."""
        if not self._active:
            return
        path = self._rank.run_dir.finished
        write_json(path, {"step": step, "time": time.time(), "attempt": self._rank.attempt.index})
        sync_folder(path.parent)

    def close(self) -> None:
        """Write what is still pending; a disk that is full to the end costs the last lines."""
        if self._metrics is None:
            return
        try:
            self._metrics.close()
        except OSError as error:
            log.warning("the last metrics could not be written: %s", error)

    def remove_stop_file(self) -> None:
        """Take back the stop file that was obeyed, or the next attempt would stop at once."""
        if self._active:
            self._rank.run_dir.stop.unlink(missing_ok=True)
