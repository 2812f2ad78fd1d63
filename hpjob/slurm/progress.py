"""How far a run has come, by the checkpoints in its folder."""

from __future__ import annotations

from hpjob.core.run_dir import RunDir
from hpjob.core.run_records import newest_checkpoint_step, read_json

ATTEMPTS_WITHOUT_PROGRESS = 3


def stuck(run: RunDir, job_id: str) -> bool:
    """Return whether the last three attempts of one job all began at the step where the run still is."""
    begins: list[int] = []
    for attempt in reversed(run.attempt_list()):
        document = read_json(attempt.attempt_json)
        if document is None or document.get("job_id") != job_id:
            break
        begins.append(int(document.get("checkpoint_step", -1)))
    newest = begins[:ATTEMPTS_WITHOUT_PROGRESS]
    step = newest_checkpoint_step(run)
    return len(newest) == ATTEMPTS_WITHOUT_PROGRESS and all(begin == step for begin in newest)
