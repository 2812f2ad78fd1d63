"""Jobs whose own script cannot queue them again: its shell was killed, or the time limit kills it during the save.

The job script starts a small step beside the ranks for that. It outlives the shell by Slurm's KillWait, which on a busy
node is too short to start Python: it is there from the beginning.
"""

from __future__ import annotations

import logging
import signal
import time

import psutil

from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import newest_checkpoint_step, read_json, write_json
from hpjob.slurm.commands import run_command
from hpjob.slurm.controller_view import ControllerView, ask_controller
from hpjob.slurm.progress import stuck

logger = logging.getLogger("hpjob")
_PATIENCE_S = 60.0
_KILLED = "the job's shell was killed from outside"
_LIMIT = "the time limit came before the job had queued itself again"
_POLL_S = 1.0


def guard(run: RunDir, attempt: AttemptDir, shell_pid: int) -> bool:
    """Watch the job's shell until it is gone or the job is queued again; return whether this did so.

    TERM says that Slurm ends the job, perhaps while the shell is still busy.
    """
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    try:
        while psutil.pid_exists(shell_pid):
            if told:
                told.clear()
                if _requeue_undisturbed(run, attempt, shell_pid):
                    return True
            time.sleep(_POLL_S)
        return _requeue_undisturbed(run, attempt, shell_pid)
    finally:
        signal.signal(signal.SIGTERM, before)


def _requeue_undisturbed(run: RunDir, attempt: AttemptDir, shell_pid: int) -> bool:
    # Slurm may send TERM more than once; it must not end the commands that ask the controller.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        return requeue_orphan(run, attempt, shell_pid)
    finally:
        signal.signal(signal.SIGTERM, before)


def requeue_orphan(run: RunDir, attempt: AttemptDir, shell_pid: int) -> bool:
    """Queue the job of an attempt again if its shell was killed or has no time left; return whether that was so."""
    document = read_json(attempt.attempt_json) or {}
    job_id, restart_count = str(document.get("job_id", "")), int(document.get("restart_count") or 0)
    end = time.monotonic() + _PATIENCE_S
    while not (attempt.end.exists() or run.finished.exists() or run.cancelled.exists()):
        view = ask_controller(job_id, patience_s=_PATIENCE_S)
        if view is not None and view.state != "RUNNING":
            reason = _reason(view, restart_count)
            return reason is not None and _requeue(run, attempt, job_id, reason)
        if psutil.pid_exists(shell_pid) or time.monotonic() > end:
            return False
        time.sleep(0.5)
    return False


def _reason(view: ControllerView, restart_count: int) -> str | None:
    if view.preempted or view.queued_again(restart_count):
        return None
    if view.timed_out and view.state in {"COMPLETING", "TIMEOUT"}:
        return _LIMIT
    return _KILLED if view.exit_signal > 0 and view.state in {"COMPLETING", "FAILED"} else None


def _requeue(run: RunDir, attempt: AttemptDir, job_id: str, reason: str) -> bool:
    again = not stuck(run, job_id)
    if reason == _KILLED:
        write_json(
            attempt.end,
            {
                "version": 1,
                "decision": "requeue" if again else "stop",
                "reason": reason if again else f"{reason}, again and again without a new checkpoint",
                "exit_code": None,
                "checkpoint_step": newest_checkpoint_step(run),
                "time": time.time(),
            },
        )
    if again:
        result = run_command(["scontrol", "requeue", job_id])
        logger.info("attempt %d: %s: requeue: %s", attempt.index, reason, "done" if result.ok else result.complaint)
    return again
