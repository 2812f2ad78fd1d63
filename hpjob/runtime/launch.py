"""What ``python -m hpjob.runtime`` does: cheap checks first, then torch, and every error to a record."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hpjob.core.errors import ExitCode, HpjobError
from hpjob.core.run_dir import RunDir
from hpjob.plan.model import Plan
from hpjob.plan.placement_line import placement_line
from hpjob.runtime.failures import FailureReporter, leave_process
from hpjob.runtime.health.progress import Progress, floor_from_env
from hpjob.runtime.rank import Rank, find_rank
from hpjob.runtime.settings import prepare_environment, read_settings
from hpjob.runtime.signals import StopRequest
from hpjob.runtime.timeouts import Timeouts
from hpjob.runtime.watcher import PeerWatcher

log = logging.getLogger(__name__)


def main(arguments: Sequence[str], stop: StopRequest) -> NoReturn:
    """Run one rank of an attempt; never returns.

    Exit code 0 = finished, or saved and ready to be started again; anything else = failure.

    Args:
        arguments: ``--run-dir R --attempt-dir A``.
        stop: Its handlers are installed already.
    """
    parser = argparse.ArgumentParser(prog="python -m hpjob.runtime", description="One rank of a training run.")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the run")
    parser.add_argument("--attempt-dir", type=Path, required=True, help="folder of this attempt")
    options = parser.parse_args(arguments)
    if RunDir(options.run_dir).finished.exists():
        sys.stderr.write(f"{options.run_dir} is finished already\n")
        leave_process(int(ExitCode.DONE))
    try:
        rank = find_rank(os.environ, options.run_dir.absolute(), options.attempt_dir.absolute())
    except HpjobError as error:
        sys.stderr.write(f"error: {error.message}\nhint: {error.hint}\n")
        leave_process(int(error.exit_code))
    _configure_logging(rank)
    _run(rank, stop)


def _run(rank: Rank, stop: StopRequest) -> NoReturn:
    reporter = FailureReporter(rank, Progress(floor_from_env(), Timeouts.from_env().setup_s))
    watcher = PeerWatcher(reporter)
    try:
        watcher.start()
        rank.check_host()
        if rank.rank == 0:
            stop.stop_file = rank.run_dir.stop
            stop.next_attempt = rank.run_dir.attempt(rank.attempt.index + 1).path
        settings = read_settings(rank)
        _say_place(rank, settings.plan)
        prepare_environment(os.environ, deterministic=settings.recipe.training.deterministic)
        # Imported late: torch takes seconds, and the checks above need none of it.
        from hpjob.runtime.session import run_attempt  # noqa: PLC0415

        run_attempt(rank, settings, reporter, watcher, stop)
    # BaseException: torch's CheckpointException is no Exception.
    except BaseException as error:
        reporter.leave(error)
    leave_process(int(ExitCode.DONE))


def _say_place(rank: Rank, plan: Plan) -> None:
    """Every rank says where it is, also those that leave other news to rank 0."""
    placement_log = log.getChild("placement")
    placement_log.setLevel(logging.INFO)
    placement_log.info("%s", placement_line(plan, rank.rank, rank.node))


def _configure_logging(rank: Rank) -> None:
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s rank {rank.rank} %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    # What all ranks would say alike is said by rank 0; warnings and errors are shown by all.
    logging.getLogger("hpjob").setLevel(logging.INFO if rank.rank == 0 else logging.WARNING)
