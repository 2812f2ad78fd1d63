"""Ranks that outlived their srun: nobody passes signals on to them, and the end of the job would kill them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from hpjob.core.run_dir import AttemptDir
from hpjob.core.run_records import read_json
from hpjob.slurm.commands import run_command
from hpjob.slurm.srun_log import TaskEnd

logger = logging.getLogger("hpjob")
STEP_NAME = "ranks"
"""Name of the job step of the ranks; the job script gives it."""
SAVE_S = 600.0
_POLL_S = 1.0


def save_without_srun(attempt: AttemptDir, exit_code: int, ends: Sequence[TaskEnd]) -> None:
    """Have the ranks save and wait until they are gone, when srun was killed and they run on."""
    if exit_code <= 128 or ends or attempt.outcome.exists():
        return
    job_id = str((read_json(attempt.attempt_json) or {}).get("job_id", ""))
    if not _ranks_run(job_id):
        return
    logger.warning("srun was killed (signal %d), its ranks run on: they are told to save", exit_code - 128)
    run_command(["scancel", "--signal=USR2", job_id])
    end = time.monotonic() + SAVE_S
    while _ranks_run(job_id) and time.monotonic() < end:
        time.sleep(_POLL_S)


def _ranks_run(job_id: str) -> bool:
    result = run_command(["squeue", "-h", "-s", "-j", job_id, "-o", "%j"])
    return result.ok and STEP_NAME in result.stdout.split()
