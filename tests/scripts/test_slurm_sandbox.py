"""The sandbox starts, survives kills, runs real jobs, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.slurm_sandbox import SCRIPT, SlurmSandbox, processes_of, wait_for, wait_until_nothing_runs

pytestmark = pytest.mark.slurm


@pytest.fixture(autouse=True)
def _slurm_is_there(slurm_sandbox: SlurmSandbox) -> None:
    """Every test here skips with the shared sandbox's reason where Slurm is missing."""


def kill_daemons(path: Path, name: str) -> None:
    def found() -> list[int]:
        commands = {pid: command.split() for pid, command in processes_of(path).items()}
        return [pid for pid, words in commands.items() if words and Path(words[0]).name == name]

    for pid in found():
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not found(), f"{name} has ended")


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_up_status_down(new_sandbox: SlurmSandbox) -> None:
    assert processes_of(new_sandbox.path) == {}
    assert "started" in new_sandbox.control("up", "--nodes", "2", "--gpus", "4").stdout
    status = new_sandbox.status()
    assert status["state"] == "running"
    assert [node["slurm_state"] for node in status["nodes"]] == ["idle", "idle"]
    assert [node["switch"] for node in status["nodes"]] == ["leaf1", "leaf2"]
    assert len({node["port"] for node in status["nodes"]} | {status["controller"]["port"]}) == 3

    assert "already running" in new_sandbox.control("up", "--nodes", "2", "--gpus", "4").stdout
    assert new_sandbox.status() == status

    new_sandbox.control("down")
    wait_until_nothing_runs(new_sandbox.path)
    assert not new_sandbox.path.exists()
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", status["controller"]["port"]))
    assert "none runs" in new_sandbox.control("down").stdout


def test_down_ends_jobs_but_not_the_users_shell(new_sandbox: SlurmSandbox, tmp_path: Path) -> None:
    new_sandbox.control("up", "--nodes", "2", "--leafs", "1")
    pids = tmp_path / "pids"
    step = f"setsid sleep 1001 & echo $! >> {pids}; env -i sleep 1002 & echo $! >> {pids}; wait"
    new_sandbox.submit("--nodes=2", f"--output={tmp_path}/out", f"--wrap=srun bash -c '{step}'")
    new_sandbox.wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 4, "four processes of the job")
    with subprocess.Popen(["sleep", "1003"], env=new_sandbox.env) as shell:
        try:
            new_sandbox.control("down")
            assert shell.poll() is None
            wait_until_nothing_runs(new_sandbox.path, but={shell.pid})
        finally:
            shell.kill()
    for pid in pids.read_text().split():
        wait_for(lambda pid=pid: has_ended(int(pid)), f"process {pid} has ended")


@pytest.mark.parametrize("reached", ["lock", "sandbox.json", "munge/socket", "log/slurmctld.out", "spool/n4"])
def test_start_that_is_killed_half_way_can_be_repeated(new_sandbox: SlurmSandbox, reached: str) -> None:
    release = ["--release", new_sandbox.release] if new_sandbox.release else []
    with subprocess.Popen(
        [sys.executable, SCRIPT, "up", "--state-dir", new_sandbox.path, *release],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as starting:
        wait_for((new_sandbox.path / reached).exists, f"{reached} exists")
        starting.kill()
    new_sandbox.control("up")
    assert new_sandbox.status()["state"] == "running"
    new_sandbox.control("down")
    wait_until_nothing_runs(new_sandbox.path)


def test_killed_daemons_are_started_again(new_sandbox: SlurmSandbox, tmp_path: Path) -> None:
    new_sandbox.control("up", "--nodes", "2")
    job = new_sandbox.submit("--nodes=2", "--output=/dev/null", "--wrap=sleep 1004")
    new_sandbox.wait_for_job(job, "RUNNING")
    # A controller that is killed before it has saved that the job runs would start it again.
    state, before = new_sandbox.path / "state" / "job_state", time.time()
    new_sandbox.run("scontrol", "update", f"JobId={job}", "Comment=saved")
    new_sandbox.wait_for(lambda: state.exists() and state.stat().st_mtime > before, "the controller has saved its jobs")
    for name in ("slurmctld", "slurmd", "munged"):
        kill_daemons(new_sandbox.path, name)
        wait_for(lambda: new_sandbox.status()["state"] == "partial", "partial")
        assert "repaired" in new_sandbox.control("up", "--nodes", "2").stdout
        assert new_sandbox.status()["state"] == "running"
    assert new_sandbox.job(job)["JobState"] == "RUNNING"


def test_after_everything_was_killed_it_starts_afresh(new_sandbox: SlurmSandbox) -> None:
    new_sandbox.control("up", "--nodes", "2")
    for name in ("slurmctld", "slurmd", "munged"):
        kill_daemons(new_sandbox.path, name)
    assert "started" in new_sandbox.control("up", "--nodes", "3", "--gpus", "0").stdout
    assert len(new_sandbox.status()["nodes"]) == 3


def test_a_stale_state_file_never_ends_a_foreign_process(new_sandbox: SlurmSandbox) -> None:
    new_sandbox.control("up", "--nodes", "1")
    kill_daemons(new_sandbox.path, "slurmctld")
    with subprocess.Popen(["sleep", "1005"]) as foreign:
        (new_sandbox.path / "slurmctld.pid").write_text(f"{foreign.pid}\n")
        new_sandbox.control("up", "--nodes", "1")
        new_sandbox.control("down")
        assert foreign.poll() is None
        foreign.kill()


def test_nodes_and_controller_stop_and_start(new_sandbox: SlurmSandbox) -> None:
    new_sandbox.control("up", "--nodes", "2", "--conf", "SlurmdTimeout=20")
    job = new_sandbox.submit("--nodes=1", "--nodelist=n2", "--output=/dev/null", "--wrap=sleep 1006", "--no-requeue")
    new_sandbox.wait_for_job(job, "RUNNING")
    new_sandbox.control("restart-controller")
    assert new_sandbox.job(job)["JobState"] == "RUNNING"
    new_sandbox.control("stop-node", "n2", "--with-jobs")
    assert new_sandbox.status()["state"] == "partial"
    new_sandbox.wait_for_job(job, "NODE_FAIL")
    new_sandbox.control("start-node", "n2")
    assert new_sandbox.status()["state"] == "running"
    unknown = new_sandbox.control("stop-node", "n7", check=False)
    assert unknown.returncode == 2
    assert "hint: did you mean n" in unknown.stderr


def test_two_sandboxes_run_side_by_side(slurm_sandbox: SlurmSandbox, new_sandbox: SlurmSandbox) -> None:
    new_sandbox.control("up", "--nodes", "1")
    assert slurm_sandbox.run("sinfo", "-h", "-o", "%D", "-p", "batch").stdout.strip() == "4"
    assert new_sandbox.run("sinfo", "-h", "-o", "%D", "-p", "batch").stdout.strip() == "1"
    new_sandbox.control("down")
    assert slurm_sandbox.status()["state"] == "running"


def test_env_points_shells_at_the_sandbox(slurm_sandbox: SlurmSandbox, new_sandbox: SlurmSandbox) -> None:
    lines = slurm_sandbox.control("env").stdout
    shell = subprocess.run(
        ["bash", "-ec", f"{lines}\nscontrol ping"], capture_output=True, text=True, check=True, timeout=300
    )
    assert "UP" in shell.stdout
    nothing = new_sandbox.control("env", check=False)
    assert (nothing.returncode, nothing.stdout) == (3, "")
    assert "slurm-sandbox up" in nothing.stderr


def test_topology_has_two_leaf_switches_and_a_spine(slurm_sandbox: SlurmSandbox) -> None:
    lines = slurm_sandbox.run("scontrol", "show", "topology").stdout.splitlines()
    switches = {line.split()[0]: line for line in lines}
    assert "Nodes=n[1-2]" in switches["SwitchName=leaf1"]
    assert "Nodes=n[3-4]" in switches["SwitchName=leaf2"]
    assert "Switches=leaf[1-2]" in switches["SwitchName=spine1"]


def test_ranks_go_where_the_host_file_says_and_see_gpus(slurm_sandbox: SlurmSandbox, tmp_path: Path) -> None:
    order = ["n3", "n1", "n4", "n2", "n3", "n1", "n4", "n2"]
    hosts = tmp_path / "hosts"
    hosts.write_text("\n".join(order) + "\n")
    show = 'echo "$SLURM_PROCID $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"'
    out = slurm_sandbox.run(
        *("salloc", "--nodes=4", "--exclusive", "--gpus-per-node=8", "env", f"SLURM_HOSTFILE={hosts}"),
        *("srun", "--ntasks=8", "--distribution=arbitrary", "--gpus-per-node=8", "bash", "-c", show),
    ).stdout
    assert sorted(out.splitlines()) == [f"{rank} {host} 0,1,2,3,4,5,6,7" for rank, host in enumerate(order)]


def test_urgent_job_preempts_and_the_job_requeues_itself(slurm_sandbox: SlurmSandbox, tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\n"
        'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then echo back; exit 0; fi\n'
        "srun bash -c 'trap \"echo step got TERM; exit 0\" TERM; echo started; while :; do sleep 0.1; done' &\n"
        "wait $!\n"
        "scontrol requeue $SLURM_JOB_ID\n"
        "sleep 1000\n"
    )
    job = slurm_sandbox.submit("--nodes=4", "--exclusive", "--gpus-per-node=8", f"--output={out}", script)
    slurm_sandbox.wait_for(lambda: out.exists() and out.read_text().count("started") == 4, "four tasks")
    urgent = slurm_sandbox.submit(
        "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap", "true"
    )
    slurm_sandbox.wait_for_job(urgent, "COMPLETED")
    slurm_sandbox.wait_for_job(job, "COMPLETED")
    assert out.read_text().count("step got TERM") == 4
    assert "back" in out.read_text()
    # Newer releases count the preemption beside the job's own request.
    assert slurm_sandbox.job(job)["Restarts"] in {"1", "2"}


def test_scancel_ends_a_job(slurm_sandbox: SlurmSandbox) -> None:
    job = slurm_sandbox.submit("--nodes=4", "--output=/dev/null", "--wrap=srun sleep 1007")
    slurm_sandbox.wait_for_job(job, "RUNNING")
    slurm_sandbox.run("scancel", job)
    slurm_sandbox.wait_for_job(job, "CANCELLED")


def test_extra_lines_replace_built_in_ones(new_sandbox: SlurmSandbox) -> None:
    new_sandbox.control("up", "--nodes", "1", "--conf", "MinJobAge=17", "--conf", "KillWait=9", "--preempt-mode", "off")
    config = new_sandbox.run("scontrol", "show", "config").stdout.split("\n")
    values = {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in config)}
    assert (values["MinJobAge"], values["KillWait"]) == ("17 sec", "9 sec")
    assert values["PreemptType"] in {"preempt/none", "(null)"}
    other = new_sandbox.control("up", "--nodes", "1", check=False)
    assert other.returncode == 2
    assert "other options" in other.stderr and "hint: " in other.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "0", "--gpus", "-1"], ["--nodes is 0", "--gpus is -1", "hint: "]),
        (["--nodes", "2", "--leafs", "3"], ["--leafs is 3, it can be 1 to 2", "hint: "]),
        (["--conf", "nonsense"], ["--conf 'nonsense' is not KEY=VALUE", "hint: "]),
        (
            ["--nodes", "3", "--leafs", "2", "--topology", "block"],
            ["does not share 3 nodes into equal blocks", "hint: "],
        ),
        (["--release", "../x"], ["no code name of a Debian", "hint: "]),
        (["--preempt-mode", "kill"], ["invalid choice: 'kill'", "hint: "]),
        (["--node", "3"], ["unrecognized arguments: --node 3", "hint: "]),
        (["--conf", "SelectType=select/none_such"], ["select/none_such", "hint: "]),
    ],
)
def test_bad_options_give_an_error_and_a_hint(
    new_sandbox: SlurmSandbox, arguments: list[str], words: list[str]
) -> None:
    done = new_sandbox.control("up", *arguments, check=False)
    assert done.returncode in (2, 3)
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert not new_sandbox.path.exists()
    wait_until_nothing_runs(new_sandbox.path)


def test_a_folder_with_other_things_is_left_alone(new_sandbox: SlurmSandbox) -> None:
    new_sandbox.path.mkdir()
    letter = new_sandbox.path / "letter.txt"
    letter.write_text("mine")
    for command in ("up", "down", "status"):
        done = new_sandbox.control(command, check=False)
        assert done.returncode == 2
        assert "--state-dir" in done.stderr
    assert letter.read_text() == "mine"


def test_status_of_no_sandbox(new_sandbox: SlurmSandbox) -> None:
    done = new_sandbox.control("status", "--json", check=False)
    assert done.returncode == 3
    assert json.loads(done.stdout)["state"] == "stopped"
