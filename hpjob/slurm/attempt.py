"""``python -m hpjob.slurm.attempt begin|end``: what the job script calls before and after the ranks run.

``begin`` prints the folder of the new attempt; ``end`` prints ``requeue``, ``done`` or ``stop``.
Everything else goes to stderr, which is the job's log.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from pathlib import Path

from hpjob.core.errors import ExitCode, HpjobError
from hpjob.core.run_dir import AttemptDir, RunDir

logger = logging.getLogger("hpjob")


def main(arguments: list[str] | None = None) -> int:
    """Run ``begin`` or ``end``; return the exit code for the job script."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(message)s")
    options = _parser().parse_args(arguments)
    try:
        sys.stdout.write(_run(options) + "\n")
    except HpjobError as error:
        logger.error("%s", error.message)
        logger.error("hint: %s", error.hint)
        return int(error.exit_code)
    except OSError as error:
        logger.error("run folder: %s", error)
        logger.error("hint: check space and permissions of %s", options.run_dir)
        return int(ExitCode.ENVIRONMENT)
    return int(ExitCode.DONE)


def _run(options: argparse.Namespace) -> str:
    run = RunDir(options.run_dir)
    if options.action == "begin":
        from hpjob.slurm.attempt_begin import begin_on_slurm  # noqa: PLC0415

        return str(begin_on_slurm(run).path)
    # When Slurm ends the whole job it may send TERM to this process too; the decision must still be made.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    from hpjob.slurm.attempt_end import end_attempt  # noqa: PLC0415

    return end_attempt(run, AttemptDir(options.attempt_dir), options.exit_code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hpjob.slurm.attempt", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    begin = actions.add_parser("begin", help="make the folder of a new attempt and print its path")
    end = actions.add_parser("end", help="print what the job has to do now that its ranks have ended")
    for action in (begin, end):
        action.add_argument("--run-dir", type=Path, required=True)
    end.add_argument("--attempt-dir", type=Path, required=True)
    end.add_argument("--exit-code", type=int, required=True, help="srun's exit code")
    return parser


if __name__ == "__main__":
    sys.exit(main())
