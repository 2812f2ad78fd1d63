"""`hpjob submit`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.support.fake_slurm import FakeSlurm, without_slurm

TINY = ("submit", "--nodes", "2", "--recipe", "tiny", "--set", "data.path=corpus")


def test_what_is_submitted_is_what_the_dry_run_shows_and_what_is_kept(cli: Cli, fake_slurm: FakeSlurm) -> None:
    shown = cli(*TINY, "--time", "2h", "--dry-run", "--", "--constraint=a100")
    assert shown.code == 0 and not Path("runs").exists()
    done = cli(*TINY, "--time", "2h", "--", "--constraint=a100")
    assert done.code == 0, done.err
    assert fake_slurm.submitted == shown.out == Path("runs/tiny-001/job.sbatch").read_text(encoding="utf-8")
    assert "#SBATCH --constraint=a100\n" in shown.out and "#SBATCH --time=02:00:00\n" in shown.out
    assert "submitted tiny-001 as Slurm job 4711" in done.out


def test_the_run_folder_explains_itself(cli: Cli, fake_slurm: FakeSlurm) -> None:
    assert cli(*TINY, "--name", "first", "--partition", "spot", "--account", "lab", "--time", "1h").code == 0
    run = Path("runs/first")
    names = {path.name for path in run.iterdir()}
    files = {"recipe.yaml", "topology.yaml", "plan.json", "job.json", "job.sbatch", "command.txt", "versions.json"}
    assert files | {"jobs.jsonl"} <= names
    recipe = (run / "recipe.yaml").read_text(encoding="utf-8")
    assert f"path: {Path('corpus').resolve()}" in recipe and "partition: spot" in recipe
    assert "hpjob submit --nodes 2" in (run / "command.txt").read_text(encoding="utf-8")
    job, successor = map(json.loads, (run / "jobs.jsonl").read_text(encoding="utf-8").splitlines())
    assert (job["job_id"], job["executor"]) == ("4711", "slurm")
    # The partition cancels what it preempts.
    assert successor["after"] == "4711" and "--dependency=afterany:4711" in fake_slurm.calls("sbatch")[-1]
    assert json.loads((run / "versions.json").read_text(encoding="utf-8"))["hpjob"]


def test_runs_are_numbered(cli: Cli, fake_slurm: FakeSlurm) -> None:
    for _ in range(2):
        assert cli(*TINY).code == 0
    assert {path.name for path in Path("runs").iterdir()} == {"tiny-001", "tiny-002"}


def test_json_is_one_document(cli: Cli, fake_slurm: FakeSlurm) -> None:
    document = json.loads(cli(*TINY, "--json").out)
    assert (document["version"], document["run"], document["job_id"]) == (1, "tiny-001", "4711")
    shown = json.loads(cli(*TINY, "--json", "--dry-run").out)
    assert shown["script"].startswith("#!/bin/bash\n")


def test_a_known_machine_needs_no_slurm_and_no_data(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_slurm(tmp_path / "bin", monkeypatch)
    result = cli("submit", "--nodes", "4", "--recipe", "70b", "--machine", "dgx-a100-80g", "--dry-run")
    assert result.code == 0
    assert "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n" in result.out
    assert "70b on 4 x dgx-a100-80g" in result.err
    assert "the recipe has no data.path" in result.err


def test_without_slurm_the_local_executor_is_named(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_slurm(tmp_path / "bin", monkeypatch)
    result = cli(*TINY, "--dry-run")
    assert result.code == 0
    assert "running on this machine with the local executor" in result.err


def test_a_silent_controller_is_no_reason_to_run_here(cli: Cli, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol show config", stderr="Unable to contact slurm controller (connect failure)", code=1)
    result = cli(*TINY)
    assert result.code == 3 and "--executor local" in result.err
    assert not Path("runs").exists()


def test_a_job_that_cannot_be_noted_is_cancelled(
    cli: Cli, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills between sbatch's answer and the note: nobody would know of the job."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hpjob.slurm.chain.record_submission", full)
    result = cli(*TINY)
    assert result.code == 3 and "No space left" in result.err
    assert fake_slurm.calls("scancel") == ["4711"]
    assert not list(Path("runs").iterdir())


def test_slurm_asked_for_but_missing(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_slurm(tmp_path / "bin", monkeypatch)
    result = cli(*TINY, "--executor", "slurm")
    assert result.code == 3
    assert "Slurm's commands are not on PATH" in result.err and "hint: " in result.err


def test_a_machine_of_a_cluster_is_not_run_here(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_slurm(tmp_path / "bin", monkeypatch)
    result = cli(*TINY, "--machine", "dgx-a100-80g")
    assert result.code == 3 and "--dry-run" in result.err


MISTAKES = {
    "unknown recipe": (("--recipe", "tinny"), 2, "tinny", "tiny"),
    "unknown partition": (("--partition", "bacth"), 2, "unknown partition 'bacth'", "`batch`"),
    "account not open": (("--partition", "spot", "--account", "la", "--time", "1h"), 2, "account 'la'", "`lab`"),
    "too many nodes": (("--nodes", "9"), 2, "9 nodes", "--nodes"),
    "does not divide": (("--set", "parallel.tp_size=3"), 2, "3", ""),
    "short time limit": (("--time", "2m"), 2, "save window", "--time"),
    "long time limit": (("--time", "3d"), 2, "above the 1-00:00:00", "--time"),
    "bare time": (("--time", "90"), 2, "no clear duration", "90m"),
    "missing data": (("--set", "data.path=nowhere"), 2, "does not exist", "hpjob data prepare"),
    "protected option": (("--", "--output=x"), 2, "--output cannot be passed", "logs"),
    "name": (("--name", "../x"), 2, "not usable", "letters"),
    "long name": (("--name", "a" * 300), 2, "not usable", "at most 200"),
    "a mistyped number of nodes": (
        ("--machine", "hgx-h100", "--nodes", "99999999", "--dry-run"),
        2,
        "99999999",
        "--nodes",
    ),
    "executor": (("--executor", "pbs"), 2, "unknown executor", "slurm or local"),
    "unknown option": (("--nodse", "2"), 2, "--nodse", "--help"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_have_a_code_a_hint_and_leave_nothing(cli: Cli, fake_slurm: FakeSlurm, name: str) -> None:
    arguments, code, words, hint = MISTAKES[name]
    result = cli(*TINY, *arguments)
    assert result.code == code, result.err
    error, _, shown_hint = result.err.partition("\nhint: ")
    assert words in error and hint in shown_hint and shown_hint.strip()
    assert "Traceback" not in result.err
    assert not Path("runs").exists() and not fake_slurm.calls("sbatch")[1:]


def test_a_name_that_exists(cli: Cli, fake_slurm: FakeSlurm) -> None:
    assert cli(*TINY, "--name", "a").code == 0
    result = cli(*TINY, "--name", "a")
    assert result.code == 2 and "exists already" in result.err and "hpjob resume a" in result.err


def test_an_unwritable_run_folder(cli: Cli, fake_slurm: FakeSlurm) -> None:
    Path("file").touch()
    result = cli(*TINY, "--run-dir", "file/runs")
    assert result.code == 3 and "cannot be written" in result.err and "--run-dir" in result.err


def test_slurms_refusal_leaves_no_folder(cli: Cli, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("sbatch", stderr="sbatch: error: Batch job submission failed: Invalid qos specification", code=1)
    result = cli(*TINY, "--qos", "nope")
    assert result.code == 5
    assert "Invalid qos specification" in result.err and "--qos" in result.err
    assert not list(Path("runs").iterdir())


def test_variables_that_would_override_are_shown(
    cli: Cli, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_TIMELIMIT", "5")
    result = cli(*TINY)
    assert result.code == 0
    assert "SBATCH_TIMELIMIT=5 is set and would override" in result.err
    assert "SBATCH_TIMELIMIT" not in fake_slurm.environment("sbatch")


def test_a_plan_that_the_runtime_cannot_run_is_refused_before_the_queue(cli: Cli, fake_slurm: FakeSlurm) -> None:
    change = ("--set", "model.model_type=phi3")
    result = cli(*TINY, *change)
    assert result.code == 2 and "runtime cannot run" in result.err
    assert cli(*TINY, *change, "--dry-run").code == 0


@pytest.mark.parametrize(
    ("option", "value", "what"),
    [
        ("--time", "99999999999h", "is longer than ten years"),
        ("--time", "90", "is no clear duration"),
        ("--partition", "a b", "partition 'a b' is no name that Slurm can have"),
        ("--account", "lab;ls", "account 'lab;ls' is no name that Slurm can have"),
    ],
)
def test_what_slurm_cannot_take_is_refused_in_a_dry_run(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, value: str, what: str
) -> None:
    without_slurm(tmp_path / "bin", monkeypatch)
    result = cli("submit", "--nodes", "4", "--recipe", "70b", "--machine", "dgx-a100-80g", "--dry-run", option, value)
    assert result.code == 2
    assert what in result.err and "hint:" in result.err
    assert result.out == ""
