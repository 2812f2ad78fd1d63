"""The signal lead by measured times, and patience with a controller that is away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpjob.core.run_dir import RunDir
from hpjob.slurm import commands
from hpjob.slurm.commands import CommandResult, is_unreachable, run_patiently
from hpjob.slurm.measured_lead import lead_warning, refresh_script
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import make_run


def measured(run: RunDir, *, step_s: float, save_s: float) -> None:
    run.metrics.write_text("".join(json.dumps({"step": i, "step_time_s": step_s}) + "\n" for i in range(1, 30)))
    run.attempt(0).path.mkdir(parents=True)
    run.attempt(0).events.write_text(json.dumps({"event": "checkpoint-saved", "duration_s": save_s}) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run", executor="slurm", spec_changes={"signal_lead_s": 150, "chain": True}).run


def test_the_next_job_gets_the_measured_lead(run: RunDir) -> None:
    measured(run, step_s=20.0, save_s=100.0)
    refresh_script(run)
    assert "#SBATCH --signal=USR2@340\n" in run.script.read_text(encoding="utf-8")
    assert json.loads(run.spec.read_text(encoding="utf-8"))["signal_lead_s"] == 340


def test_before_anything_was_measured_the_script_stays(run: RunDir) -> None:
    before = run.script.read_text(encoding="utf-8")
    refresh_script(run)
    assert run.script.read_text(encoding="utf-8") == before


@pytest.mark.parametrize(("save_s", "said"), [(5.0, False), (100.0, True)])
def test_a_kept_script_that_gives_too_little_time_is_said(run: RunDir, save_s: float, said: bool) -> None:
    measured(run, step_s=20.0, save_s=save_s)
    warning = lead_warning(run)
    assert (warning is not None) is said
    assert warning is None or ("340 s before the time limit" in warning and "gives 150 s" in warning)


def test_a_controller_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    away = CommandResult(1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    answers = iter([away, away, CommandResult(0, "here", "")])
    monkeypatch.setattr(commands, "run_command", lambda *_, **__: next(answers))
    monkeypatch.setattr(commands, "_RETRY_S", 0.0)
    assert run_patiently(["scontrol", "show", "job"]).stdout == "here"


def test_a_refusal_is_an_answer(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol requeue", stderr="Requested operation is presently disabled", code=1)
    assert not is_unreachable(run_patiently(["scontrol", "requeue", "7"]))
    assert len(fake_slurm.calls("scontrol")) == 1
