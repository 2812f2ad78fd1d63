"""``hpjob logs``: what the ranks wrote, the first failing rank first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpjob.core.run_dir import RunDir
    from hpjob.report.read import Attempt, RunRecord


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="logs")(logs)


def logs(
    run: str | None = typer.Argument(None, help="Name, folder or job id of a run. [default: the newest]"),
    run_dir: Path = typer.Option(Path("runs"), "--run-dir", help="Folder of all runs."),
    rank: int | None = typer.Option(None, "--rank", min=0, help="Log of this rank. [default: the first failing one]"),
    attempt: int | None = typer.Option(
        None, "--attempt", min=0, help="Only this attempt. [default: all, as one log, from the newest back]"
    ),
    lines: int = typer.Option(40, "--lines", "-n", min=0, help="Lines of each log."),
    follow: bool = typer.Option(False, "--follow", "-f", help="Go on with new lines until the run ends."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Show the end of the log that says most; the first failing rank is named first, its traceback comes last."""
    from hpjob.cli.find_run import find_run
    from hpjob.report.logs import job_log, rank_to_show
    from hpjob.report.read import read_run

    found = find_run(run, run_dir)
    record = read_run(found.path)
    chosen = _attempt(record, attempt)
    if as_json:
        _print_document(found, chosen, rank, lines, record.attempts[:-1] if attempt is None else ())
        return
    if chosen is None:
        _show_job_log(found, lines)
        return
    shown = rank if rank is not None else rank_to_show(chosen)
    if shown is None:
        typer.echo(f"attempt {chosen.files.index} has no logs of ranks; the job's own:", err=True)
        _show_tail(job_log(found, chosen.job_id, chosen.executor), lines)
        return
    path = chosen.files.rank_log(shown)
    _check_rank(path, chosen)
    _name_failures(chosen)
    _show_joined([chosen] if attempt is not None else record.attempts, shown, lines)
    if follow:
        _follow(found, path, None if attempt is not None else shown)
    if chosen.save_problem:
        typer.echo(f"\n{chosen.save_problem}")
    _show_first_failure(chosen)


def _attempt(record: RunRecord, index: int | None) -> Attempt | None:
    from hpjob.core.errors import UserInputError

    if index is None:
        return record.last_attempt
    for attempt in record.attempts:
        if attempt.files.index == index:
            return attempt
    numbers = ", ".join(str(attempt.files.index) for attempt in record.attempts)
    raise UserInputError(f"there is no attempt {index}", hint=f"the attempts are {numbers or 'not begun yet'}")


def _earlier(attempts: Sequence[Attempt], rank: int, lines: int) -> list[dict[str, object]]:
    from hpjob.report.logs import tail
    from hpjob.report.timeline import why_ended

    logs = ((attempt, attempt.files.rank_log(rank)) for attempt in attempts)
    return [
        {"attempt": one.files.index, "path": str(log), "lines": tail(log, lines), "why_ended": why_ended(one)}
        for one, log in logs
        if log.exists()
    ]


def _print_document(
    run: RunDir, attempt: Attempt | None, rank: int | None, lines: int, earlier: Sequence[Attempt]
) -> None:
    import json
    from dataclasses import asdict

    from hpjob.report.logs import rank_to_show, tail

    document: dict[str, object] = {"version": 1, "run": run.name, "attempt": None, "rank": None, "path": None}
    document |= {"lines": [], "earlier": [], "failures": [], "first_failure": None}
    if attempt is not None:
        shown = rank if rank is not None else rank_to_show(attempt)
        failure = attempt.first_failure
        document |= {"attempt": attempt.files.index, "rank": shown, "failures": [asdict(f) for f in attempt.failures]}
        document["first_failure"] = asdict(failure) if failure is not None else None
        if shown is not None:
            path = attempt.files.rank_log(shown)
            _check_rank(path, attempt)
            document |= {"path": str(path), "lines": tail(path, lines), "earlier": _earlier(earlier, shown, lines)}
    typer.echo(json.dumps(document, indent=2))


def _check_rank(path: Path, attempt: Attempt) -> None:
    from hpjob.core.errors import UserInputError
    from hpjob.report.logs import ranks_with_logs

    if not path.exists():
        ranks = ranks_with_logs(attempt.files)
        raise UserInputError(
            f"{path.name} is not in attempt {attempt.files.index}",
            hint=f"it has logs of ranks {ranks[0]} to {ranks[-1]}" if ranks else "its ranks have not started yet",
        )


def _show_job_log(run: RunDir, lines: int) -> None:
    from hpjob.cli.find_run import run_argument
    from hpjob.report.logs import job_log
    from hpjob.slurm.live import read_submissions

    submissions = read_submissions(run)
    path = job_log(run, submissions[-1].job_id, submissions[-1].executor) if submissions else None
    if path is None or not path.exists():
        typer.echo(
            f"{run.name} has no logs yet: its job has not started (`hpjob status {run_argument(run)}`)", err=True
        )
        return
    _show_tail(path, lines)


def _name_failures(attempt: Attempt) -> None:
    from hpjob.cli.run_status import first_line

    first = attempt.first_failure
    if first is None:
        return
    typer.echo(f"rank {first.rank} on {first.node} failed first: {first_line(first)}")
    others = [failure for failure in attempt.failures if failure is not first]
    if others:
        ranks = ", ".join(str(failure.rank) for failure in sorted(others, key=lambda failure: failure.rank))
        typer.echo(f"then ranks {ranks}")
    typer.echo("")


def _show_first_failure(attempt: Attempt) -> None:
    first = attempt.first_failure
    if first is None:
        return
    typer.echo(f"\n==> first failure: rank {first.rank} on {first.node} <==")
    typer.echo((first.traceback or first.message).rstrip())


def _show_tail(path: Path, lines: int) -> None:
    from hpjob.report.logs import tail

    typer.echo(f"==> {path} <==")
    for line in tail(path, lines):
        typer.echo(line)


def _show_joined(attempts: Sequence[Attempt], rank: int, lines: int) -> None:
    """Print the last lines of a rank, going back over earlier attempts as far as needed."""
    from hpjob.report.logs import joined_tail
    from hpjob.report.timeline import why_ended

    parts = joined_tail(attempts, rank, lines)
    for part in parts:
        typer.echo(f"==> {part.path} <==")
        for line in part.lines:
            typer.echo(line)
        if part is not parts[-1]:
            typer.echo(f"-- attempt {part.attempt.files.index} ended: {why_ended(part.attempt)}\n")


def _follow(run: RunDir, path: Path, rank: int | None) -> None:
    """Print what is added to a log until the run ends; with a rank also that of attempts to come."""
    import time

    from hpjob.cli.run_status import run_status

    stream = path.open("rb")
    stream.seek(0, 2)
    asked_at, goes_on = 0.0, True
    while True:
        data = stream.read()
        if data:
            typer.echo(data.decode("utf-8", errors="replace"), nl=False)
            continue
        following = _next_log(run, path, rank)
        if following is not None:
            stream.close()
            path, stream = following, following.open("rb")
            typer.echo(f"\n==> {path} <==")
            continue
        if not goes_on:
            stream.close()
            return
        if time.monotonic() - asked_at > 5.0:
            asked_at = time.monotonic()
            goes_on = run_status(run).state in {"waiting", "running", "unknown"}
        time.sleep(0.5)


def _next_log(run: RunDir, path: Path, rank: int | None) -> Path | None:
    """Return the log of the first attempt after that of ``path`` that has one."""
    if rank is None:
        return None
    later = (attempt.rank_log(rank) for attempt in run.attempt_list() if attempt.path.name > path.parent.name)
    return next((log for log in later if log.exists()), None)
