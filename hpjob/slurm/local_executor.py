"""submitit's local executor, so that a run needs no Slurm: the default where none answers.

submitit's controller gives time limit, warning signal before it, and restarts; our launcher runs the ranks. ``python -m
hpjob.slurm.local_executor FOLDER`` is that controller with no limit on restarts.
"""

from __future__ import annotations

import functools
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.local.local import Controller, LocalExecutor, LocalJob

from hpjob.slurm.local_job import HELD_SIGNALS, run_local_job

# A preempted run goes on until it is finished; whether it makes progress is judged by `attempt_end`.
_MAX_STARTS = 1_000_000
# submitit counts the limit down in a loop, so "none" is ten years.
_NO_LIMIT_S = 10 * 365 * 24 * 3600


class DetachedLocalExecutor(LocalExecutor):
    """Runs one job as a process of its own session, which outlives the shell that started it.

    Args:
        folder: Where submitit keeps its files.
        time_limit_s: Of one attempt; None = none.
        signal_lead_s: How long before the limit the ranks are told to save.
        setup: Shell lines run before.
    """

    def __init__(
        self, folder: Path, *, time_limit_s: int | None, signal_lead_s: int, setup: Sequence[str] = ()
    ) -> None:
        super().__init__(folder=folder)
        self._time_limit_s = time_limit_s or _NO_LIMIT_S
        self._signal_lead_s = signal_lead_s
        self._setup = tuple(setup)

    def submit_run(self, run_dir: Path) -> str:
        """Start the job and return its id: the controller's process id."""
        return self.submit(functools.partial(run_local_job, str(run_dir))).job_id

    def _submit_command(self, command: str) -> LocalJob[Any]:
        # submitit's own way leaves the controller in the shell's session, where closing the terminal
        # kills it, and hides all GPUs.
        environment = os.environ | {
            "SUBMITIT_LOCAL_NTASKS": "1",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_TIMEOUT_S": str(self._time_limit_s),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(self._signal_lead_s),
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
        }
        controller = shlex.join([sys.executable, "-m", "hpjob.slurm.local_executor", str(self.folder)])
        script = "\n".join([*self._setup, f"exec {controller}"])
        with (self.folder / "controller.log").open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        return LocalJob(folder=self.folder, job_id=str(process.pid), process=process, tasks=[0])


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)  # its children inherit that
    Controller(Path(sys.argv[1])).run(max_retry=_MAX_STARTS)
