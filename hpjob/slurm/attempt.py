"""``python -m hpjob.slurm.attempt begin|end|guard``: what the job script calls before, after and beside the ranks.

``begin`` prints the folder of the new attempt, nothing when there is nothing to do; ``end`` prints ``requeue``,
``queued``, ``chain``, ``done`` or ``stop``. ``guard`` lives as long as the job's shell and stands in for ``end`` when
the shell cannot run it.
Everything else goes to stderr, which is the job's log.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from hpjob.core.errors import ExitCode, HpjobError
from hpjob.core.run_dir import AttemptDir, RunDir

logger = logging.getLogger("hpjob")
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main(arguments: list[str] | None = None) -> int:
    """Run one action; return the exit code for the job script."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(message)s")
    options = _parser().parse_args(arguments)
    try:
        with _stop_signals_ignored() if options.action == "end" else nullcontext():
            sys.stdout.write(_run(options) + "\n")
            sys.stdout.flush()
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

        attempt = begin_on_slurm(run)
        return str(attempt.path) if attempt is not None else ""
    if options.action == "guard":
        from hpjob.slurm.orphan import guard  # noqa: PLC0415

        return "requeued" if guard(run, AttemptDir(options.attempt_dir), options.shell_pid) else ""
    from hpjob.slurm.attempt_end import end_attempt  # noqa: PLC0415

    return end_attempt(run, AttemptDir(options.attempt_dir), options.exit_code)


@contextmanager
def _stop_signals_ignored() -> Iterator[None]:
    """When Slurm ends the whole job it may send TERM to this process too; the decision must still be made."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hpjob.slurm.attempt", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    begin = actions.add_parser("begin", help="make the folder of a new attempt and print its path")
    end = actions.add_parser("end", help="print what the job has to do now that its ranks have ended")
    guard = actions.add_parser("guard", help="watch the job's shell, and queue the job again if that cannot")
    for action in (begin, end, guard):
        action.add_argument("--run-dir", type=Path, required=True)
    for action in (end, guard):
        action.add_argument("--attempt-dir", type=Path, required=True)
    guard.add_argument("--shell-pid", type=int, required=True, help="process of the job script")
    end.add_argument("--exit-code", type=int, required=True, help="srun's exit code")
    return parser


if __name__ == "__main__":
    sys.exit(main())
