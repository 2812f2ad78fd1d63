"""How far a run has come, by the checkpoints in its folder."""

from __future__ import annotations

from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import first_failure, newest_checkpoint_step, read_failures, read_json
from hpjob.slurm.live import read_submissions

ATTEMPTS_WITHOUT_PROGRESS = 3


def stuck(run: RunDir, job_id: str) -> bool:
    """Return whether the last three attempts of a job and those it succeeds all began at the step where the run is."""
    before = {submission.job_id: submission.after for submission in read_submissions(run)}
    family = {job_id}
    while (earlier := before.get(job_id)) is not None and earlier not in family:
        family.add(earlier)
        job_id = earlier
    begins: list[int] = []
    for attempt in reversed(run.attempt_list()):
        document = read_json(attempt.attempt_json)
        if document is None or document.get("job_id") not in family:
            break
        begins.append(int(document.get("checkpoint_step", -1)))
    newest = begins[:ATTEMPTS_WITHOUT_PROGRESS]
    step = newest_checkpoint_step(run)
    return len(newest) == ATTEMPTS_WITHOUT_PROGRESS and all(begin == step for begin in newest)


def no_progress_report(run: RunDir, attempt: AttemptDir, cause: str) -> list[str]:
    """Return a line for each of the last attempts: where it began, what ended it.

    Args:
        run: The run.
        attempt: The one that ends now, whose end is not written yet.
        cause: What ended it.
    """
    lines = []
    for one in run.attempt_list()[-ATTEMPTS_WITHOUT_PROGRESS:]:
        document, end = read_json(one.attempt_json) or {}, read_json(one.end) or {}
        why = cause if one.index == attempt.index else end.get("reason") or "ended without a word"
        first = first_failure(read_failures(one))
        log = f"; log of rank {first.rank}: {one.rank_log(first.rank)}" if first is not None else ""
        nodes = ", ".join(document.get("hostnames") or ("?",))
        begin = document.get("checkpoint_step", "?")
        lines.append(f"attempt {one.index} on {nodes} from checkpoint step {begin}: {why}{log}")
    return lines
