"""submitit's Slurm executor with our script."""

from __future__ import annotations

from pathlib import Path

import pytest
from submitit.slurm.slurm import SlurmExecutor

from hpjob.core.errors import SlurmRefusedError
from hpjob.slurm.executor import ScriptExecutor
from hpjob.slurm.submit_environment import override_warnings, variables_to_remove
from tests.support.fake_slurm import FakeSlurm

SCRIPT = "#!/bin/bash\n#SBATCH --nodes=2\necho 'ä %j'\n"


def test_sbatch_gets_exactly_the_script(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    executor = ScriptExecutor(tmp_path / "submitit", SCRIPT)
    assert isinstance(executor, SlurmExecutor)
    assert executor.submit_script() == "4711"
    assert fake_slurm.submitted == SCRIPT
    assert (tmp_path / "submitit" / "4711_submission.sh").read_text(encoding="utf-8") == SCRIPT


def test_hooks_that_are_overridden_exist_in_submitit() -> None:
    """The two underscored hooks are submitit's; another version may rename them."""
    for name in ("_make_submission_file_text", "_make_submission_command", "_submit_command"):
        assert callable(getattr(SlurmExecutor, name))


def test_variables_of_a_job_around_us_do_not_reach_sbatch(
    fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SBATCH_PARTITION", "SLURM_NTASKS", "SRUN_CPUS_PER_TASK", "SLURM_CONF", "SLURM_CLUSTERS", "MY_TOKEN"):
        monkeypatch.setenv(name, "x y")
    ScriptExecutor(tmp_path, SCRIPT).submit_script()
    seen = fake_slurm.environment("sbatch")
    assert not {"SBATCH_PARTITION", "SLURM_NTASKS", "SRUN_CPUS_PER_TASK"} & set(seen)
    assert {"SLURM_CONF", "SLURM_CLUSTERS", "MY_TOKEN"} <= set(seen)


def test_overriding_variables_are_named_with_their_value() -> None:
    environment = {"SBATCH_TIMELIMIT": "5", "SLURM_NTASKS": "3", "HOME": "/h", "SLURM_CONF": "/etc/slurm.conf"}
    (warning,) = override_warnings(environment)
    assert warning.startswith("SBATCH_TIMELIMIT=5 is set and would override")
    assert variables_to_remove(environment) == ["SBATCH_TIMELIMIT", "SLURM_NTASKS"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination", "--account"),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", "fewer nodes"),
        ("sbatch: error: invalid partition specified: nope", "sinfo -s"),
        ("something never seen", "--dry-run"),
    ],
)
def test_refusal_has_slurms_words_and_a_hint(
    fake_slurm: FakeSlurm, tmp_path: Path, capfd: pytest.CaptureFixture[str], words: str, hint: str
) -> None:
    fake_slurm.answer("sbatch", stderr=words, code=1)
    with pytest.raises(SlurmRefusedError) as caught:
        ScriptExecutor(tmp_path, SCRIPT).submit_script()
    assert words in caught.value.message
    assert hint in caught.value.hint
    assert capfd.readouterr().err == ""


def test_an_answer_without_a_job_id_is_a_refusal(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    fake_slurm.answer("sbatch", "hello\n")
    with pytest.raises(SlurmRefusedError, match="hello"):
        ScriptExecutor(tmp_path, SCRIPT).submit_script()
