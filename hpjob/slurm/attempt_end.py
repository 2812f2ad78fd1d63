"""What a job does once its ranks have ended: queue itself again, be done, or stop."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from pathlib import Path

from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import (
    Failure,
    first_failure,
    newest_checkpoint_step,
    read_failures,
    read_json,
    write_json,
)
from hpjob.slurm.chain import cancel_successors
from hpjob.slurm.decide import Decision, decide
from hpjob.slurm.live import waiting_successors
from hpjob.slurm.measured_lead import lead_warning
from hpjob.slurm.node_faults import note_node_faults
from hpjob.slurm.progress import no_progress_report, stuck
from hpjob.slurm.rescue import save_without_srun
from hpjob.slurm.srun_log import TaskEnd, parse_srun_log

logger = logging.getLogger("hpjob")


def end_attempt(run: RunDir, attempt: AttemptDir, exit_code: int, ends: list[TaskEnd] | None = None) -> Decision:
    """Read what the ranks left, add what only the launcher saw, decide, and note the decision in ``end.json``.

    Args:
        run: The run.
        attempt: The attempt whose ranks have ended.
        exit_code: Of srun, or of our own launcher.
        ends: How ranks ended, in the order seen; None = read srun's log.
    """
    if ends is None:
        ends = parse_srun_log(_read(attempt.srun_log))
        save_without_srun(attempt, exit_code, ends)
    add_lost_ranks(attempt, ends)
    decision, reason = decide(run, attempt, exit_code, ends)
    successors = [waiting.job_id for waiting in waiting_successors(run)] if decision == "chain" else []
    left_out = note_node_faults(run, attempt, ends, decision=decision, successors=successors)
    failure = first_failure(read_failures(attempt))
    job_id = str((read_json(attempt.attempt_json) or {}).get("job_id", ""))
    report: list[str] = []
    if decision == "stop" and stuck(run, job_id):
        report = no_progress_report(run, attempt, failure.message.strip() if failure is not None else reason)
        for line in report:
            logger.error("%s", line)
    write_json(
        attempt.end,
        {
            "version": 1,
            "decision": decision,
            "reason": reason,
            "left_out": left_out,
            "report": report,
            "exit_code": exit_code,
            "checkpoint_step": newest_checkpoint_step(run),
            "time": time.time(),
        },
    )
    if failure is not None and decision == "stop":
        logger.error(
            "rank %d on %s failed first (%s): %s", failure.rank, failure.node, failure.kind, failure.message.strip()
        )
    logger.info("attempt %d: %s: %s", attempt.index, decision, reason)
    if decision in {"stop", "done"}:
        if cancelled := cancel_successors(run):
            logger.info("cancelled its successor %s", ", ".join(cancelled))
    elif warning := lead_warning(run):
        logger.warning("%s", warning)
    return decision


def add_lost_ranks(attempt: AttemptDir, ends: list[TaskEnd]) -> None:
    """Write a failure record for each rank that ended badly and left none itself."""
    hosts = _read(attempt.hosts).split()
    primary = [end for end in ends if not end.after_abort] or ends[:1]
    for end in primary:
        ranks = end.ranks or tuple(rank for rank, host in enumerate(hosts) if host == end.node)
        for rank in ranks:
            _record_lost_rank(attempt, rank=rank, node=end.node, what=end.what, exited=end.exited)


def _record_lost_rank(attempt: AttemptDir, *, rank: int, node: str, what: str, exited: bool) -> None:
    """Write the failure record of a rank that left none."""
    path = attempt.failure(rank)
    known = read_json(path)
    # What another rank wrote in its place says less than how the launcher saw it end.
    if known is not None and known.get("reported_by") is None:
        return
    log = attempt.rank_log(rank)
    traceback = _last_traceback(_read(log)) if exited else ""
    last_line = traceback.splitlines()[-1] if traceback else ""
    record = Failure(
        rank=rank,
        node=node,
        # Nobody saw the moment; a rank's last line in its log was written before it.
        time=log.stat().st_mtime if log.exists() else time.time(),
        kind="exception" if exited else "killed",
        exception=last_line.partition(":")[0] or None,
        message=last_line or _words(what, log.name),
        traceback=traceback or None,
    )
    path.parent.mkdir(exist_ok=True)
    write_json(path, asdict(record))


def _words(what: str, log_name: str) -> str:
    cause = " (SIGKILL, often from the system that ran out of memory)" if what.startswith("Killed") else ""
    return f"{what}{cause}; the rank left no report, its log is {log_name}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _last_traceback(text: str) -> str:
    """Return the last Python traceback of a log up to the line that names the exception."""
    start = text.rfind("Traceback (most recent call last):")
    if start < 0:
        return ""
    lines = text[start:].splitlines()
    for index, line in enumerate(lines[1:], start=1):
        if line and not line[0].isspace():
            return "\n".join(lines[: index + 1])
    return "\n".join(lines)
