"""The job script run by a real bash, with stand-ins for srun, scontrol and Python."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpjob.slurm.model import JobSpec
from hpjob.slurm.render import render_script
from tests.support.slurm_sandbox import wait_for

_PYTHON = """#!/bin/bash
# Stands in for `python -m hpjob.slurm.attempt`.
echo "$*" >>{folder}/python.calls
if [[ $3 == begin ]]; then
  [[ -e {folder}/begin-fails ]] && exit 4
  [[ -e {folder}/nothing-to-do ]] && exit 0
  mkdir -p {folder}/attempts/0000 && printf 'n2\\nn2\\nn1\\nn1\\n' >{folder}/attempts/0000/hosts
  echo {folder}/attempts/0000
else
  cat {folder}/decision
fi
"""
_SRUN = """#!/bin/bash
folder={folder}
[[ $1 == --job-name=guard ]] && exec sleep 60
printf '%s\\n' "$@" >{folder}/srun.arguments
env >{folder}/srun.env
echo "srun: error: n1: task 3: Killed" >&2
trap 'echo USR2 >>"$folder/srun.signals"; exit 0' USR2
trap 'echo TERM >>"$folder/srun.signals"' TERM
touch {folder}/srun.started
[[ -e {folder}/ranks-run ]] && while :; do sleep 0.05; done
exit "$(<{folder}/srun.code)"
"""
_SCONTROL = """#!/bin/bash
echo "$*" >>{folder}/scontrol.calls
exit "$(<{folder}/scontrol.code)"
"""


@dataclass
class Job:
    """A job script and the stand-ins around it."""

    folder: Path
    environment: dict[str, str]

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start the script; what it leaves behind is ended, as Slurm would do."""
        process = subprocess.Popen(
            ["bash", self.folder / "job.sbatch"],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        yield process
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def run(self, *, srun: int = 0, decision: str = "stop", scontrol: int = 1) -> subprocess.CompletedProcess[str]:
        for name, text in (("srun.code", srun), ("decision", decision), ("scontrol.code", scontrol)):
            (self.folder / name).write_text(f"{text}\n")
        command = ["bash", self.folder / "job.sbatch"]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=240, check=False)

    def read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    folder = tmp_path / "run 1"
    programs = tmp_path / "bin"
    for path in (folder, programs):
        path.mkdir()
    texts = {folder / "python": _PYTHON, programs / "srun": _SRUN, programs / "scontrol": _SCONTROL}
    for path, text in texts.items():
        path.write_text(text.replace("{folder}", f"'{folder}'"))
        path.chmod(0o755)
    spec = JobSpec(
        job_name="run-1", run_dir=str(folder), python=str(folder / "python"), nodes=2, ranks_per_node=2, gpus_per_node=2
    )
    (folder / "job.sbatch").write_text(render_script(spec))
    environment = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "3",
        "SRUN_CPUS_PER_TASK": "3",
    }
    yield Job(folder, environment)


def test_ranks_are_placed_by_the_host_file(job: Job) -> None:
    job.run()
    arguments = job.read("srun.arguments").splitlines()
    hosts = job.folder / "attempts" / "0000" / "hosts"
    assert f"SLURM_HOSTFILE={hosts}" in job.read("srun.env").splitlines()
    # Newer releases refuse a number of nodes beside a host file.
    assert not any(argument.startswith("--nodes") for argument in arguments)
    assert {"--ntasks=4", "--ntasks-per-node=2", "--distribution=arbitrary"} <= set(arguments)
    assert {"--kill-on-bad-exit=1", "--gpus-per-node=2", f"--output={hosts.parent}/rank-%5t.log"} <= set(arguments)
    assert "CPUS_PER_TASK" not in job.read("srun.env")


def test_the_code_of_the_ranks_is_the_code_of_the_job(job: Job) -> None:
    assert job.run(srun=9).returncode == 9
    assert "--exit-code 9" in job.read("python.calls")


def test_a_job_that_must_stop_is_never_a_success(job: Job) -> None:
    assert job.run(srun=0, decision="stop").returncode == 1


def test_done_is_a_success_whatever_srun_says(job: Job) -> None:
    assert job.run(srun=1, decision="done").returncode == 0


def test_a_decision_that_never_came_stops_the_job(job: Job) -> None:
    assert job.run(srun=0, decision="").returncode == 1


def test_what_srun_says_is_kept_and_shown(job: Job) -> None:
    done = job.run()
    assert job.read("attempts/0000/srun.log") == "srun: error: n1: task 3: Killed\n"
    assert "n1: task 3: Killed" in done.stderr


def test_a_finished_run_starts_nothing(job: Job) -> None:
    (job.folder / "FINISHED").touch()
    assert job.run().returncode == 0
    assert not job.read("python.calls")


def test_a_failed_begin_starts_no_ranks(job: Job) -> None:
    (job.folder / "begin-fails").touch()
    assert job.run().returncode == 4
    assert not job.read("srun.arguments")


def test_a_refused_requeue_fails_the_job_and_says_how_to_go_on(job: Job) -> None:
    done = job.run(decision="requeue", scontrol=1)
    assert job.read("scontrol.calls") == "requeue 7\n"
    assert done.returncode == 1
    assert "hpjob resume" in done.stderr


def test_a_controller_that_is_away_is_asked_again(job: Job) -> None:
    """It is just being restarted; the first refusal in words is final."""
    answers = '[[ $(wc -l <"$f/scontrol.calls") -gt 2 ]] && words="Requested operation is disabled"'
    text = f'#!/bin/bash\nf={shlex.quote(str(job.folder))}\necho "$*" >>"$f/scontrol.calls"\n'
    text += f'words="Unable to contact slurm controller"\n{answers}\necho "$words" >&2\nexit 1\n'
    programs = Path(job.environment["PATH"].partition(os.pathsep)[0])
    (programs / "scontrol").write_text(text)
    (programs / "sleep").write_text("#!/bin/bash\n")
    (programs / "sleep").chmod(0o755)
    done = job.run(decision="requeue")
    assert job.read("scontrol.calls") == "requeue 7\n" * 3
    assert done.returncode == 1 and "operation is disabled" in done.stderr


def test_a_request_that_the_controller_forgot_is_made_again(job: Job) -> None:
    """The shell lives on: a refusal then is no end either, for Slurm may be about to end the job."""
    calls = shlex.quote(str(job.folder / "scontrol.calls"))
    asked = f"$(cat {calls} 2>/dev/null | wc -l)"
    programs = Path(job.environment["PATH"].partition(os.pathsep)[0])
    (programs / "sleep").write_text(f"#!/bin/bash\n[[ {asked} -ge 4 ]] && kill -TERM $PPID\nexit 0\n")
    (programs / "sleep").chmod(0o755)
    answer = f"[[ {asked} -ne 3 ]] && exit 0\necho Job is in transition >&2\nexit 1\n"
    (programs / "scontrol").write_text(f'#!/bin/bash\necho "$*" >>{calls}\n{answer}')
    done = job.run(decision="requeue")
    assert job.read("scontrol.calls") == "requeue 7\n" * 4
    assert done.returncode == -signal.SIGTERM and "in transition" in done.stderr


def test_a_successor_with_nothing_to_do_starts_no_ranks(job: Job) -> None:
    (job.folder / "nothing-to-do").touch()
    assert job.run().returncode == 0
    assert not job.read("srun.arguments")


def test_after_a_requeue_the_script_waits_to_be_ended(job: Job) -> None:
    """Leaving by itself would be recorded as an ordinary end; TERM must end it at once, not after KillWait."""
    for name, text in (("srun.code", 0), ("decision", "requeue"), ("scontrol.code", 0)):
        (job.folder / name).write_text(f"{text}\n")
    with job.started() as process:
        wait_for(lambda: job.read("scontrol.calls"), "requeue asked")
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=240) == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_the_shell_reaches_the_ranks_as_usr2(job: Job, number: signal.Signals) -> None:
    """TERM would make srun kill all ranks at once."""
    for name, text in (("decision", "stop"), ("scontrol.code", 0), ("ranks-run", "")):
        (job.folder / name).write_text(f"{text}\n")
    with job.started() as process:
        wait_for((job.folder / "srun.started").exists, "srun started")
        process.send_signal(number)
        assert process.wait(timeout=240) == 1
    assert job.read("srun.signals") == "USR2\n"
    assert "--exit-code 0" in job.read("python.calls")


def test_a_signal_before_the_shell_has_noted_who_srun_is_reaches_the_ranks(job: Job) -> None:
    """A busy machine may run the new process first, for a while."""
    for name, text in (("decision", "stop"), ("scontrol.code", 0), ("ranks-run", "")):
        (job.folder / name).write_text(f"{text}\n")
    script, told = job.folder / "job.sbatch", job.folder / "told"
    noted, wait = "\nsrun_pid=$!\n", f"\nuntil [[ -e {shlex.quote(str(told))} ]]; do sleep 0.05; done"
    assert script.read_text().count(noted) == 1
    script.write_text(script.read_text().replace(noted, wait + noted))
    with job.started() as process:
        wait_for((job.folder / "srun.started").exists, "srun started")
        process.send_signal(signal.SIGTERM)
        told.touch()
        assert process.wait(timeout=240) == 1
    assert job.read("srun.signals") == "USR2\n"


def test_nodes_to_leave_out_are_handed_over_after_the_job_was_queued_again(job: Job) -> None:
    attempt = job.folder / "attempts" / "0000"
    attempt.mkdir(parents=True)
    (attempt / "exclude").write_text("n[2,4]\n")
    assert job.run(srun=3, decision="requeue", scontrol=0).returncode == 0
    assert job.read("scontrol.calls").splitlines() == ["requeue 7", "update JobId=7 ExcNodeList=n[2,4]"]
