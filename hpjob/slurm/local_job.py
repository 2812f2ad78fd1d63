"""One attempt of a local job: begin, ranks, end. submitit's controller starts it again for every requeue."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE

from hpjob.core.errors import HpjobError
from hpjob.core.run_dir import RunDir
from hpjob.core.run_records import read_json
from hpjob.core.schema import parse
from hpjob.slurm.attempt_begin import Start, begin
from hpjob.slurm.attempt_end import end_attempt
from hpjob.slurm.local_launcher import LocalLauncher, die_with
from hpjob.slurm.model import JobSpec
from hpjob.slurm.submit_environment import cleaned

logger = logging.getLogger("hpjob")
HELD_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""What asks to save waits until somebody listens: before that it would end the process."""


def run_local_job(run_dir: str) -> None:
    """Run one attempt and leave with the code that tells submitit's controller whether to start another.

    Args:
        run_dir: The run's folder, absolute.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(message)s")
    # Should the controller be killed, the ranks save and leave instead of running on unseen.
    die_with(int(os.environ["SUBMITIT_LOCAL_JOB_ID"]), signal.SIGTERM)()
    try:
        code = _run(RunDir(Path(run_dir)), os.environ["SUBMITIT_LOCAL_JOB_ID"])
    except HpjobError as error:
        logger.error("%s", error.message)
        logger.error("hint: %s", error.hint)
        code = int(error.exit_code)
    if code:
        sys.exit(code)


def _run(run: RunDir, job_id: str) -> int:
    if run.finished.exists():
        logger.info("this run is finished, there is nothing to do")
        return 0
    spec = parse(JobSpec, read_json(run.spec) or {}, source=str(run.spec))
    launcher = LocalLauncher(run, spec.python, rank_environment(os.environ, spec.env))
    launcher.install_signal_handlers()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
    attempt = begin(run, _start(run, job_id))
    exit_code, ends = launcher.run(attempt)
    match end_attempt(run, attempt, exit_code, ends):
        case "requeue" | "queued" | "chain":
            return LOCAL_REQUEUE_RETURN_CODE
        case "done":
            return 0
        case "stop":
            return exit_code or 1


def rank_environment(environment: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the ranks: a person's own, without those of a Slurm job around us."""
    defaults = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1")}
    return cleaned(environment) | defaults | dict(extra)


def _start(run: RunDir, job_id: str) -> Start:
    from hpjob.topology.load import load_topology  # noqa: PLC0415

    topology = load_topology(str(run.topology))
    documents = (read_json(attempt.attempt_json) or {} for attempt in run.attempt_list())
    return Start(
        job_id=job_id,
        executor="local",
        restart_count=sum(document.get("job_id") == job_id for document in documents),
        topology=topology,
        addresses={node.name: "127.0.0.1" for node in topology.nodes},
        own_node=topology.nodes[0].name,
        site={},
    )
