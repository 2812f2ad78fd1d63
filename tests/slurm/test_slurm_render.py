"""Job scripts: golden files, syntax, quoting, refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from hpjob.core.errors import UserInputError
from hpjob.slurm import render
from hpjob.slurm.model import JobSpec
from hpjob.slurm.render import render_script

GOLDEN = Path(__file__).parent / "golden"

SPECS = {
    "minimal": JobSpec(
        job_name="tiny-001", run_dir="/shared/runs/tiny-001", python="/opt/venv/bin/python", nodes=1, ranks_per_node=8,
        gpus_per_node=0,
    ),
    "everything": JobSpec(
        job_name="llama-70b", run_dir="/shared/runs/llama-70b", python="/opt/venv/bin/python", nodes=4,
        ranks_per_node=8, gpus_per_node=8, segment=2, cpus_per_rank=12, time_limit_s=36 * 3600, partition="batch",
        account="lab", qos="high", signal_lead_s=300, chain=True, setup=("module load cuda/12.8", "export SITE=one"),
        env={"NCCL_DEBUG": "WARN", "HF_HOME": "/shared/hf"}, extra_options=("--constraint=a100&ib", "--exclusive"),
    ),
    "awkward": JobSpec(
        job_name="it's", run_dir="/shared/my runs/100% it's $HOME", python="/opt/my env/bin/python", nodes=2,
        ranks_per_node=4, gpus_per_node=4, partition="a;b", signal="USR1", requeue=False,
        env={"QUOTES": "a \"b\" 'c' $(d) `e`"}, extra_options=("--comment=two words # no comment",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_script_is_as_kept(name: str) -> None:
    assert render_script(SPECS[name]) == (GOLDEN / f"{name}.sbatch").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SPECS)
def test_script_passes_bash_and_shellcheck(name: str) -> None:
    path = GOLDEN / f"{name}.sbatch"
    shellcheck = Path(sys.executable).parent / "shellcheck"
    # SC2016 takes a dollar sign in single quotes for a slip; here it is a literal value.
    for command in (["bash", "-n", path], [shellcheck, "--exclude=SC2016", path]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_values_reach_the_shell_unchanged() -> None:
    """What stands in quotes is what the shell sees, whatever it holds."""
    spec = SPECS["awkward"]
    lines = [line for line in render_script(spec).splitlines() if line.startswith(("run_dir=", "python=", "export Q"))]
    shown = 'printf "%s\\n" "$run_dir" "$python" "$QUOTES"'
    done = subprocess.run(["bash", "-c", "\n".join([*lines, shown])], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [spec.run_dir, spec.python, spec.env["QUOTES"]]


def test_no_gpu_request_without_gpus_and_never_one_per_task() -> None:
    for spec in SPECS.values():
        script = render_script(spec)
        assert ("--gpus-per-node" in script) == (spec.gpus_per_node > 0)
        assert "gpus-per-task" not in script
        assert "CUDA_VISIBLE_DEVICES" not in script


@pytest.mark.parametrize(
    "change",
    [
        {"partition": "batch\n#SBATCH --output=/etc/passwd"},
        {"job_name": "a\rb"},
        {"env": {"A": "x\ny"}},
        {"extra_options": ("--comment=a\nrm -rf /",)},
    ],
)
def test_line_breaks_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(UserInputError, match="line break"):
        render_script(SPECS["everything"].model_copy(update=change))


def test_names_of_variables_are_checked() -> None:
    with pytest.raises(UserInputError, match="no name of an environment variable"):
        render_script(SPECS["minimal"].model_copy(update={"env": {"A;rm": "1"}}))


def test_a_name_that_the_template_does_not_know_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt field must not render as nothing: `--qos=` would be a wrong request."""
    (tmp_path / "job.sbatch.j2").write_text("#SBATCH --qos={{ spec.qso }}\n", encoding="utf-8")
    monkeypatch.setattr(render, "data_dir", lambda kind: tmp_path)
    with pytest.raises(UndefinedError):
        render_script(SPECS["minimal"])
