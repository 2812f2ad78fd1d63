"""Which run a person means: a name, a path, a job id, or the newest."""

from __future__ import annotations

from pathlib import Path

from hpjob.core.errors import UserInputError
from hpjob.core.run_dir import RunDir
from hpjob.core.run_records import read_json, read_json_lines

RUN_HELP = "Name, folder or job id of a run. [default: the newest]"
RUNS_HELP = "Folder of all runs."
DEFAULT_RUNS = Path("runs")


def find_run(text: str | None, runs: Path = DEFAULT_RUNS) -> RunDir:
    """Return the run that ``text`` names.

    Raises:
        UserInputError: There is none, or several have that job id.
    """
    known = _known_runs(runs)
    if text is None:
        if not known:
            raise UserInputError(
                f"no runs in {runs}", hint="start one with `hpjob submit`, or name its folder: `hpjob status DIR`"
            )
        return max(known, key=_last_submitted)
    for path in (runs / text, Path(text)):
        if _is_run(path):
            return RunDir(path.absolute())
    if text.isdigit():
        with_job = [run for run in known if text in _job_ids(run)]
        if with_job:
            return max(with_job, key=_last_submitted)
    raise _unknown(text, runs, known)


def run_argument(run: RunDir) -> str:
    """Return how a person names the run on the command line here."""
    return run.name if run.path.parent == DEFAULT_RUNS.absolute() else str(run.path)


def _known_runs(runs: Path) -> list[RunDir]:
    if not runs.is_dir():
        return []
    return [RunDir(path.absolute()) for path in sorted(runs.iterdir()) if _is_run(path)]


def _is_run(path: Path) -> bool:
    run = RunDir(path)
    return run.script.is_file() and run.recipe.is_file()


def _last_submitted(run: RunDir) -> float:
    times = [float(line.get("submitted_at", 0)) for line in read_json_lines(run.jobs)]
    return max(times, default=run.script.stat().st_mtime)


def _job_ids(run: RunDir) -> set[str]:
    submitted = {str(line.get("job_id")) for line in read_json_lines(run.jobs)}
    started = {str((read_json(attempt.attempt_json) or {}).get("job_id")) for attempt in run.attempt_list()}
    return submitted | started


def _unknown(text: str, runs: Path, known: list[RunDir]) -> UserInputError:
    from hpjob.core.schema import nearest

    names = [run.name for run in known]
    guess = nearest(text, names)
    if guess:
        hint = f"did you mean `{guess}`?"
    elif names:
        hint = f"the runs in {runs} are {', '.join(names[-10:])}"
    else:
        hint = f"there are no runs in {runs}; give the run's folder"
    return UserInputError(f"no run {text!r}", hint=hint)
